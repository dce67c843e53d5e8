"""The feed: what must be tried again goes first, the end is the end, and nothing the source does holds up a drain."""

import asyncio

import pytest
from doubles import Spine, prompt, turns

from headway.errors import PromptError
from headway.flow.prompt_feed import READ_AHEAD, PromptFeed
from headway.types import SourceExhausted


async def listed(n, *, then=None):
    for number in range(n):
        yield prompt(number)
    if then is not None:
        raise then


async def silent():
    await asyncio.get_running_loop().create_future()
    yield prompt()


@pytest.fixture
async def feed():
    """Make feeds whose sources are being read, and stop reading in the end."""
    readers = []

    def make(spine, source):
        made = PromptFeed(source, watch=spine.watch, record=spine.record, clock=spine.clock)
        readers.append(asyncio.ensure_future(made.run()))
        return made

    yield make
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)


async def test_a_requeued_prompt_goes_first(feed):
    spine = Spine()
    prompts = feed(spine, listed(3))
    assert await anext(prompts) == prompt(0)
    prompts.requeue(prompt(0))
    assert [await anext(prompts) for _ in range(3)] == [prompt(0), prompt(1), prompt(2)]
    assert prompts.taken == 3


async def test_the_end_of_the_source_is_recorded_once_and_ends_the_feed_when_nothing_is_live(feed):
    spine = Spine()
    assert [one async for one in feed(spine, listed(2))] == [prompt(0), prompt(1)]
    assert spine.of(SourceExhausted) == [SourceExhausted(0.0)]


@pytest.mark.parametrize("state", ["running", "ready"])
async def test_while_a_live_group_could_send_its_prompt_back_the_feed_waits(feed, state):
    spine = Spine()
    prompts = feed(spine, listed(1))
    given = await anext(prompts)
    spine.admit(0, of=given) if state == "running" else spine.ready_group(0)
    following = asyncio.ensure_future(anext(prompts))
    await turns()
    assert not following.done()
    spine.drop(0, "stale", requeued=True)
    prompts.requeue(given)
    assert await following == given
    spine.admit(1, of=given)
    following = asyncio.ensure_future(anext(prompts, "the end"))
    await turns()
    assert not following.done()
    spine.drop(1, "stale")
    assert await following == "the end"
    assert len(spine.of(SourceExhausted)) == 1


async def test_a_drain_ends_the_feed_and_does_not_say_that_the_data_has_ended(feed):
    spine = Spine()
    prompts = feed(spine, listed(5))
    await anext(prompts)
    spine.drain()
    prompts.requeue(prompt(9))
    assert [one async for one in prompts] == []
    assert not spine.ledger.exhausted


async def test_a_source_that_gives_nothing_does_not_hold_up_a_drain(feed):
    spine = Spine()
    following = asyncio.ensure_future(anext(feed(spine, silent()), "the end"))
    await turns()
    spine.drain()
    assert await following == "the end"
    assert not spine.ledger.exhausted


async def test_a_drain_ends_the_wait_for_live_groups(feed):
    spine = Spine()
    spine.admit(0)
    following = asyncio.ensure_future(anext(feed(spine, listed(0)), "the end"))
    await turns()
    assert not following.done()
    spine.drain()
    assert await following == "the end"


async def test_a_source_that_fails_is_named_with_how_far_it_came():
    spine = Spine()
    prompts = PromptFeed(listed(2, then=OSError("no such disk")), watch=spine.watch, record=spine.record, clock=spine.clock)
    with pytest.raises(PromptError, match="failed after 2 prompts: OSError: no such disk"):
        await prompts.run()
    assert [await anext(prompts), await anext(prompts)] == [prompt(0), prompt(1)]


async def test_an_error_that_is_ours_already_travels_as_it_is():
    spine = Spine()
    prompts = PromptFeed(listed(0, then=PromptError("row 3: no prompt")), watch=spine.watch, record=spine.record, clock=spine.clock)
    with pytest.raises(PromptError, match=r"^row 3: no prompt$"):
        await prompts.run()


async def test_the_source_is_read_a_little_ahead_and_no_further(feed):
    spine = Spine()
    given = 0

    async def counted():
        nonlocal given
        while True:
            given += 1
            yield prompt(given)

    prompts = feed(spine, counted())
    await turns()
    assert given == READ_AHEAD
    for _ in range(3):
        await anext(prompts)
        await turns()
    assert given == READ_AHEAD + 3
    assert prompts.taken == 3


async def test_a_prompt_that_comes_back_says_how_often_it_was_tried(feed):
    prompts = feed(Spine(), listed(1))
    given = await anext(prompts)
    prompts.requeue(given)
    again = await anext(prompts)
    prompts.requeue(again)
    assert [given.tries, again.tries, (await anext(prompts)).tries] == [0, 1, 2]
