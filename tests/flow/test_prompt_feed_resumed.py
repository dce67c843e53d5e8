"""The feed of a run that is taken up again: what its position has left, nothing in quarantine, and no wait for what the source has lost."""

import asyncio

import pytest
from doubles import Spine, beside, prompt, turns

from headway.errors import PromptError
from headway.events import GroupDropped, PromptDropped, Resumed, SourceExhausted
from headway.flow.prompt_feed import PromptFeed
from headway.types import DataPosition


class Source:
    """A source that gives these prompts for any position, and keeps the position; `then`: what it raises at its end."""

    def __init__(self, *prompts, then=None):
        self.prompts, self.then, self.position = prompts, then, None

    def __aiter__(self):
        raise AssertionError("a run that is taken up again does not begin from the start")

    async def after(self, position):
        self.position = position
        for one in self.prompts:
            yield one
        if self.then is not None:
            raise self.then


def resumed(*waiting, published=True):
    """Return a spine whose ledger has these prompts (name, epoch) waiting since an earlier process ended, and the position."""
    spine = Spine(published=published)
    for group, (name, epoch) in enumerate(waiting):
        spine.admit(group, of=prompt(name, epoch))
    spine.record(Resumed(0.0, 0, 0, "line"))
    for group in range(len(waiting)):
        spine.record(GroupDropped(0.0, group, "interrupted", "", 0, requeued=True))
    return spine, DataPosition(1, frozenset({"p8"}), dict(spine.ledger.waiting))


def feed(spine, source, position):
    return PromptFeed(source, watch=spine.watch, record=spine.record, clock=spine.clock, position=position)


def missing(spine):
    return [(drop.prompt_id, drop.epoch) for drop in spine.of(PromptDropped) if drop.cause == "missing"]


async def test_the_source_is_asked_for_what_the_position_has_left_and_gives_it_in_its_order():
    spine, position = resumed((3, 0))
    source = Source(prompt(3, 0), prompt(9, 1))
    prompts = feed(spine, source, position)
    async with beside(prompts.run()):
        assert [await anext(prompts) for _ in range(2)] == list(source.prompts)
    assert source.position is position
    assert (missing(spine), spine.ledger.waiting_prompts) == ([], 1)  # the one that waits is in somebody's hand, and not admitted


async def test_a_prompt_that_waits_and_that_the_source_has_lost_is_missing_once_the_source_is_past_its_epoch():
    spine, position = resumed((3, 0), (4, 1))
    prompts = feed(spine, Source(prompt(9, 1), prompt(9, 2)), position)
    async with beside(prompts.run()):
        assert await anext(prompts) == prompt(9, 1)
        await turns()
        assert missing(spine) == [("p3", 0), ("p4", 1)]  # reading ahead it has seen epoch 2
    assert spine.ledger.waiting_prompts == 0


async def test_within_its_epoch_a_prompt_may_still_come():
    spine, position = resumed((4, 1))
    prompts = feed(spine, Source(prompt(9, 1), prompt(4, 1)), position)
    async with beside(prompts.run()):
        await turns()
        assert missing(spine) == []
        assert [await anext(prompts) for _ in range(2)] == [prompt(9, 1), prompt(4, 1)]


async def test_when_the_source_ends_nothing_waits_for_what_it_has_lost():
    spine, position = resumed((3, 0), (4, 1))
    prompts = feed(spine, Source(prompt(4, 1)), position)
    async with beside(prompts.run()):
        given = await anext(prompts)
        spine.admit(2, of=given)
        spine.drop(2, "stale")
        assert await anext(prompts, "the end") == "the end"
    assert missing(spine) == [("p3", 0)]
    assert len(spine.of(SourceExhausted)) == 1
    assert spine.ledger.waiting_prompts == 0


async def test_a_source_that_fails_says_nothing_of_what_is_missing_and_ends_the_run():
    spine, position = resumed((3, 0))
    prompts = feed(spine, Source(prompt(9, 0), then=OSError("the lease is gone")), position)
    with pytest.raises(PromptError, match="failed after 1 prompts: OSError: the lease is gone") as error:
        await prompts.run()
    assert isinstance(error.value.__cause__, OSError)
    assert missing(spine) == []


async def test_prompts_in_quarantine_are_passed_over_in_every_epoch_and_in_both_queues():
    spine, position = resumed((3, 0), (4, 0))
    prompts = feed(spine, Source(prompt(3, 0), prompt(4, 0), prompt(3, 1), prompt(4, 1)), position)
    async with beside(prompts.run()):
        assert await anext(prompts) == prompt(3, 0)
        prompts.requeue(prompt(3, 0))
        spine.record(PromptDropped(0.0, "p3", 0, "quarantined", "poison", 3))
        assert [await anext(prompts) for _ in range(2)] == [prompt(4, 0), prompt(4, 1)]


async def test_a_prompt_in_quarantine_that_waits_in_another_epoch_is_not_waited_for():
    spine, position = resumed((3, 0))
    spine.admit(1, of=prompt(3, 1))
    spine.record(GroupDropped(0.0, 1, "incomplete", "", 0))
    spine.record(PromptDropped(0.0, "p3", 1, "quarantined", "poison", 3))
    spine.admit(2, of=prompt(3, 2))
    spine.drop(2, "stale", requeued=True)  # it ran while the other was being judged
    prompts = feed(spine, Source(prompt(3, 0)), position)
    async with beside(prompts.run()):
        assert await anext(prompts, "the end") == "the end"
    assert spine.ledger.waiting_prompts == 0


async def test_a_prompt_that_was_put_in_quarantine_before_the_source_should_have_given_it_is_not_missed():
    spine, position = resumed((3, 0), (4, 0))
    spine.record(PromptDropped(0.0, "p3", 0, "quarantined", "poison", 3))
    prompts = feed(spine, Source(prompt(9, 1)), position)
    async with beside(prompts.run()):
        assert await anext(prompts) == prompt(9, 1)
    assert missing(spine) == [("p4", 0)]


async def test_when_everything_is_in_quarantine_a_drain_still_ends_the_feed():
    spine, position = resumed((3, 0))
    spine.record(PromptDropped(0.0, "p3", 0, "quarantined", "poison", 3))
    forever = asyncio.get_running_loop().create_future()

    class Silent(Source):
        async def after(self, position):
            yield prompt(3, 0)
            await forever

    prompts = feed(spine, Silent(), position)
    async with beside(prompts.run()):
        following = asyncio.ensure_future(anext(prompts, "the end"))
        await turns()
        assert not following.done()
        spine.drain()
        assert await following == "the end"
