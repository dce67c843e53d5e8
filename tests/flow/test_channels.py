"""Channels hand every value over once, hold back who is too fast, and end when they are closed."""

import asyncio
import random

import pytest
from doubles import turns
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.flow.channels import Channel, ChannelClosedError
from headway.sim.loop import run


async def test_values_arrive_in_order_and_a_closed_channel_ends_the_input():
    channel = Channel(3)
    for value in (1, 2, 3):
        await channel.send(value)
    channel.close()
    channel.close()
    assert [value async for value in channel] == [1, 2, 3]


async def test_a_full_channel_holds_its_sender_back_until_a_value_is_taken():
    channel, sent = Channel(2), []

    async def send():
        for value in range(5):
            await channel.send(value)
            sent.append(value)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send())
        await turns()
        assert (sent, len(channel)) == ([0, 1], 2)
        assert await anext(channel) == 0
        await turns()
        assert (sent, len(channel)) == ([0, 1, 2], 2)
        assert [await anext(channel) for _ in range(4)] == [1, 2, 3, 4]


async def test_sending_after_the_end_is_an_error_for_who_comes_and_for_who_waits():
    channel = Channel(1)
    await channel.send(1)
    waiting = asyncio.ensure_future(channel.send(2))
    await turns()
    channel.close()
    with pytest.raises(ChannelClosedError):
        await waiting
    with pytest.raises(ChannelClosedError):
        await channel.send(3)
    assert [value async for value in channel] == [1]


async def test_closing_wakes_every_receiver():
    channel = Channel(1)
    waiting = [asyncio.ensure_future(anext(channel, "the end")) for _ in range(3)]
    await turns()
    channel.close()
    assert await asyncio.gather(*waiting) == ["the end"] * 3


def test_a_channel_for_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        Channel(0)


@pytest.mark.parametrize("side", ["receivers", "senders"])
async def test_a_wake_up_of_someone_cancelled_at_that_moment_goes_to_the_next(side):
    channel = Channel(1)
    if side == "senders":
        await channel.send(0)
        first, second = (asyncio.ensure_future(channel.send(value)) for value in (1, 2))
    else:
        first, second = (asyncio.ensure_future(anext(channel)) for _ in range(2))
    await turns()
    if side == "senders":
        assert await anext(channel) == 0
    else:
        await channel.send(7)
    first.cancel()
    assert await second == (None if side == "senders" else 7)
    assert first.cancelled()
    assert len(channel) == (1 if side == "senders" else 0)


async def _turmoil(seed, capacity):
    """Let senders and receivers come and be cancelled at random instants; return what is left inside and who waits at the end."""
    draw, channel, sent, received = random.Random(seed), Channel(capacity), [], []

    async def send(value):
        await channel.send(value)
        sent.append(value)

    async def receive():
        received.append(await anext(channel))

    senders, receivers = [], []
    for value in range(draw.randint(1, 25)):
        senders.append(asyncio.ensure_future(send(value)))
        if draw.random() < 0.8:
            receivers.append(asyncio.ensure_future(receive()))
        for task in draw.sample([*senders, *receivers], draw.randint(0, 1)):
            task.cancel()
        for _ in range(draw.randint(0, 2)):
            await asyncio.sleep(0)
    await turns(60)
    waiting = [sum(not task.done() for task in side) for side in (senders, receivers)]
    for task in (*senders, *receivers):
        task.cancel()
    await turns()
    channel.close()
    return [value async for value in channel], sent, received, waiting


@settings(max_examples=200)
@given(st.integers(0, 2**32), st.integers(0, 2**32), st.integers(1, 3))
def test_whoever_is_cancelled_whenever_no_value_and_no_wake_up_is_lost(seed, order, capacity):
    inside, sent, received, (senders, receivers) = run(_turmoil(seed, capacity), seed=order)
    assert sorted(received + inside) == sorted(sent)
    assert not (receivers and inside), "a receiver sleeps beside a value"
    assert not (senders and len(inside) < capacity), "a sender sleeps beside a free place"
