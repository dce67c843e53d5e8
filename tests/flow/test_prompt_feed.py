"""The feed: what must be tried again goes first, the end is the end, and nothing the source does holds up a drain."""

import asyncio

import pytest
from doubles import Spine, prompt, turns

from headway.errors import PromptError
from headway.flow.prompt_feed import PromptFeed
from headway.types import SourceExhausted


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


async def test_a_requeued_prompt_goes_first():
    spine = Spine()
    prompts = feed(spine, listed(3))
    assert await anext(prompts) == prompt(0)
    prompts.requeue(prompt(0))
    assert [await anext(prompts) for _ in range(3)] == [prompt(0), prompt(1), prompt(2)]
    assert prompts.taken == 3


async def test_the_end_of_the_source_is_recorded_once_and_ends_the_feed_when_nothing_is_live():
    spine = Spine()
    assert [one async for one in feed(spine, listed(2))] == [prompt(0), prompt(1)]
    assert spine.of(SourceExhausted) == [SourceExhausted(0.0)]


@pytest.mark.parametrize("state", ["running", "ready"])
async def test_while_a_live_group_could_send_its_prompt_back_the_feed_waits(state):
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


async def test_a_drain_ends_the_feed_and_does_not_say_that_the_data_has_ended():
    spine = Spine()
    prompts = feed(spine, listed(5))
    await anext(prompts)
    spine.drain()
    prompts.requeue(prompt(9))
    assert [one async for one in prompts] == []
    assert not spine.ledger.exhausted


async def test_a_source_that_gives_nothing_does_not_hold_up_a_drain():
    spine = Spine()
    following = asyncio.ensure_future(anext(feed(spine, silent()), "the end"))
    await turns()
    spine.drain()
    assert await following == "the end"
    assert not spine.ledger.exhausted


async def test_a_drain_ends_the_wait_for_live_groups():
    spine = Spine()
    spine.admit(0)
    following = asyncio.ensure_future(anext(feed(spine, listed(0)), "the end"))
    await turns()
    assert not following.done()
    spine.drain()
    assert await following == "the end"


async def test_a_source_that_fails_is_named_with_how_far_it_came():
    prompts = feed(Spine(), listed(2, then=OSError("no such disk")))
    await anext(prompts)
    await anext(prompts)
    with pytest.raises(PromptError, match="failed after 2 prompts: OSError: no such disk"):
        await anext(prompts)


async def test_an_error_that_is_ours_already_travels_as_it_is():
    with pytest.raises(PromptError, match=r"^row 3: no prompt$"):
        await anext(feed(Spine(), listed(0, then=PromptError("row 3: no prompt"))))


async def test_a_feed_that_is_cancelled_leaves_no_pull_behind():
    waiting = asyncio.ensure_future(anext(feed(Spine(), silent())))
    await turns()
    waiting.cancel()
    await turns()
    assert asyncio.all_tasks() == {asyncio.current_task()}
