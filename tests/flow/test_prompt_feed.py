"""The feed: what must be tried again goes first, the end is the end, and nothing the source does holds up a drain."""

import asyncio

import msgspec
import pytest
from doubles import Spine, beside, prompt, together, turns

from headway.errors import PromptError
from headway.events import PromptDropped, SourceExhausted
from headway.flow.prompt_feed import READ_AHEAD, PromptFeed
from headway.sim.prompts import ListPrompts


async def listed(n, *, then=None):
    for number in range(n):
        yield prompt(number)
    if then is not None:
        raise then


async def silent():
    await asyncio.get_running_loop().create_future()
    yield prompt()


def feed(spine, source):
    return PromptFeed(source, watch=spine.watch, record=spine.record, clock=spine.clock)


def again(given, tries=1):
    return msgspec.structs.replace(given, tries=tries)


async def test_prompts_come_in_the_order_of_the_source_and_one_that_is_requeued_goes_first_and_counts_its_tries():
    prompts = feed(Spine(), listed(3))
    async with beside(prompts.run()):
        assert await anext(prompts) == prompt(0)
        prompts.requeue(prompt(0))
        first = await anext(prompts)
        assert first == again(prompt(0))
        prompts.requeue(first)
        assert [await anext(prompts) for _ in range(3)] == [again(prompt(0), 2), prompt(1), prompt(2)]


async def test_the_source_is_read_ahead_a_little_and_no_further():
    given = []

    async def endless():
        while True:
            given.append(prompt(len(given)))
            yield given[-1]

    prompts = feed(Spine(), endless())
    async with beside(prompts.run()):
        await turns()
        assert len(given) == READ_AHEAD
        assert [await anext(prompts) for _ in range(10)] == given[:10]
        await turns()
        assert len(given) == READ_AHEAD + 10
        assert [await anext(prompts) for _ in range(3 * READ_AHEAD)] == given[10 : 10 + 3 * READ_AHEAD]


async def test_the_end_of_the_source_is_recorded_once_when_its_last_prompt_is_taken_and_ends_the_feed_when_nothing_is_live():
    spine = Spine()
    prompts = feed(spine, listed(2))
    await prompts.run()
    assert [await anext(prompts), await anext(prompts)] == [prompt(0), prompt(1)]
    assert not spine.ledger.exhausted  # the last one is in somebody's hand, and not admitted
    assert [one async for one in prompts] == []
    assert spine.of(SourceExhausted) == [SourceExhausted(0.0)]


@pytest.mark.parametrize("state", ["running", "ready"])
async def test_while_a_live_group_could_send_its_prompt_back_the_feed_waits(state):
    spine = Spine()
    prompts = feed(spine, listed(1))
    await prompts.run()
    given = await anext(prompts)
    spine.admit(0, of=given) if state == "running" else spine.ready_group(0)
    following = asyncio.ensure_future(anext(prompts))
    await turns()
    assert not following.done()
    spine.drop(0, "stale", requeued=True)
    prompts.requeue(given)
    assert await following == again(given)
    spine.admit(1, of=given)
    following = asyncio.ensure_future(anext(prompts, "the end"))
    await turns()
    assert not following.done()
    spine.drop(1, "stale")
    assert await following == "the end"
    assert len(spine.of(SourceExhausted)) == 1


async def test_a_prompt_that_comes_back_does_not_wait_for_a_slow_source():
    spine = Spine()
    prompts = feed(spine, silent())
    async with beside(prompts.run()):
        following = asyncio.ensure_future(anext(prompts))
        await turns()
        spine.admit(0)
        spine.drop(0, "stale", requeued=True)
        prompts.requeue(prompt(0))
        assert await following == again(prompt(0))


async def test_a_drain_ends_the_feed_and_does_not_say_that_the_data_has_ended():
    spine = Spine()
    prompts = feed(spine, listed(5))
    await prompts.run()
    await anext(prompts)
    spine.drain()
    prompts.requeue(prompt(9))
    assert [one async for one in prompts] == []
    assert not spine.ledger.exhausted


async def test_a_source_that_gives_nothing_does_not_hold_up_a_drain():
    spine = Spine()
    prompts = feed(spine, silent())
    async with beside(prompts.run()):
        following = asyncio.ensure_future(anext(prompts, "the end"))
        await turns()
        spine.drain()
        assert await following == "the end"
    assert not spine.ledger.exhausted


async def test_a_drain_ends_the_wait_for_live_groups():
    spine = Spine()
    prompts = feed(spine, listed(0))
    await prompts.run()
    spine.admit(0)
    following = asyncio.ensure_future(anext(prompts, "the end"))
    await turns()
    assert not following.done()
    spine.drain()
    assert await following == "the end"


async def test_a_source_without_end_of_which_a_whole_epoch_is_in_quarantine_has_ended():
    spine = Spine()
    prompts = feed(spine, ListPrompts(2, shuffle=False))
    async with beside(prompts.run()):
        first, second = await anext(prompts), await anext(prompts)
        for given in (first, second):
            spine.record(PromptDropped(0.0, given.id, 0, "quarantined", "it never works"))
        async with asyncio.timeout(60):
            assert await anext(prompts, "the end") == "the end"
    assert spine.ledger.exhausted


async def test_a_source_that_fails_ends_the_run_by_name_with_how_far_it_came():
    with pytest.raises(PromptError, match="failed after 2 prompts: OSError: no such disk"):
        await together(feed(Spine(), listed(2, then=OSError("no such disk"))).run())


async def test_a_source_that_fails_does_not_look_like_the_end_of_the_data():
    spine = Spine()
    prompts = feed(spine, listed(0, then=OSError("no such disk")))
    following = asyncio.ensure_future(anext(prompts, "the end"))
    with pytest.raises(PromptError):
        await together(prompts.run())
    await turns()
    assert not following.done()
    assert not spine.ledger.exhausted
    following.cancel()


async def test_an_error_that_is_ours_already_travels_as_it_is():
    with pytest.raises(PromptError, match=r"^row 3: no prompt$"):
        await together(feed(Spine(), listed(0, then=PromptError("row 3: no prompt"))).run())
