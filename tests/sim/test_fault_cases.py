"""Fault cases of public systems, played on virtual time: each test claims what cannot happen here, and cites its case."""

from collections import Counter
from math import inf

import pytest
from bound_world import MODES, bounded, bounded_world, play

from headway.events import Admitted, BatchFormed, Finished, GroupDropped, Published, Ready, RolloutDropped
from headway.rules.batching import MAX_REQUEUES
from headway.sim.distributions import Fixed
from headway.sim.engine import EngineSettings
from headway.sim.loop import run
from headway.sim.prompts import ListPrompts
from headway.sim.trainer import TrainerSettings

NO_PAUSE = [EngineSettings(pauses=False)]
STEADY = TrainerSettings(seconds=Fixed(1.0))


def first_prompt(n):
    """The prompt that a source of n admits first."""

    async def ask():
        return await anext(aiter(ListPrompts(n)))

    return run(ask()).id


def slow_prompt(prompt, seconds, others=0.1):
    return lambda asked, _: Fixed(seconds if asked.id == prompt else others)


def of(kind, result):
    return [event for event in result.events if isinstance(event, kind)]


def batch_of(group, result):
    return next(batch for batch in result.batches.values() if group in batch.groups)


# -------------------------------------------------------------------------------------------------------------------------------- admission


@pytest.mark.parametrize("mode", [mode for mode, (enforce, _) in MODES.items() if enforce == "admission"])
def test_A01_a_blocked_trainer_lets_no_more_groups_start_than_the_batches_within_the_bound_take(mode):
    """A01, at version 0: B = 8, K = 2."""
    section = bounded(mode, 2, groups_per_batch=8)
    trainer = TrainerSettings(seconds=Fixed(1.0), late={0: 500.0})
    result = play(bounded_world(Fixed(0.5), trainer=trainer), section, 20)
    published = next(event.time for event in of(Published, result) if event.version == 1)
    assert published > 500
    assert sum(event.time < published for event in of(Admitted, result)) == (2 + 1) * 8
    assert result.max_staleness == 2


@pytest.mark.parametrize("mode", MODES)
def test_A10_a_bound_of_zero_trains_on_policy_and_does_not_hang(mode):
    """A10: a limit in flight of staleness x batch would be zero."""
    result = play(bounded_world(), bounded(mode, 0, groups_per_batch=4, group_size=2), 5)
    assert list(result.batches) == [0, 1, 2, 3, 4]
    assert all(set(batch.tokens) == {0} for batch in result.batches.values())
    assert mode == "mask at ship" or not any(batch.masked for batch in result.batches.values())


# ------------------------------------------------------------------------------------------------------------------------- one slow rollout


def overtaken(mode, versions):
    """One rollout stays open while exactly `versions` versions are published: one group a batch, and no other group for the next."""
    slow = first_prompt(versions + 1)
    world = bounded_world(slow_prompt(slow, 20.0), trainer=STEADY, engines=NO_PAUSE, prompts=versions + 1, epochs=1)
    result = play(world, bounded(mode, 4, groups_per_batch=1), 100)
    assert result.reason == "the prompts are used up"
    (first, *again) = [event.group for event in of(Admitted, result) if event.prompt_id == slow]
    return result, first, again


@pytest.mark.parametrize("mode", MODES)
def test_A02_a_rollout_that_was_open_while_as_many_versions_as_the_bound_were_published_is_delivered_at_that_age(mode):
    """A02, on the near side: K = 4, 4 versions."""
    result, slow, again = overtaken(mode, 4)
    batch = batch_of(slow, result)
    assert (batch.k, max(batch.tokens), dict(batch.masked), dict(batch.heads), again) == (4, 4, {}, {4: 1}, [])
    assert not of(GroupDropped, result)


@pytest.mark.parametrize("mode", ["mask", "mask at ship"])
def test_A02_one_version_more_and_its_oldest_tokens_are_masked(mode):
    """A02, on the far side: K = 4, 5 versions."""
    result, slow, again = overtaken(mode, 5)
    batch = batch_of(slow, result)
    assert (batch.k, max(batch.tokens), set(batch.masked), dict(batch.heads), again) == (5, 4, {5}, {4: 1}, [])
    assert batch.whole_heads == 0
    assert result.rows["metrics"][5]["head_coverage"] == 0


def test_A02_one_version_more_is_not_published_before_it_is_delivered_under_wait():
    """A02, on the far side: the fifth batch waits for it."""
    result, slow, again = overtaken("wait", 5)
    batch = batch_of(slow, result)
    assert (batch.k, max(batch.tokens), again) == (4, 4, [])
    finished = next(event.time for event in of(Finished, result) if event.group == slow)
    assert finished == 20.0
    assert max(event.version for event in of(Published, result) if event.time < finished) == 4
    assert not of(GroupDropped, result)


@pytest.mark.parametrize("mode", ["drop", "drop at ship"])
def test_A02_one_version_more_and_it_is_dropped_and_its_prompt_tried_again(mode):
    """A02, on the far side: K = 4, 5 versions."""
    result, slow, again = overtaken(mode, 5)
    (dropped,) = of(GroupDropped, result)
    assert (dropped.group, dropped.cause, dropped.requeued) == (slow, "stale", True)
    assert batch_of(again[0], result).k == 5
    assert len(again) == 1


SPANNED = 6  # versions that come out while one rollout runs: K + 2, K = 4


def straddling(mode):
    """One rollout runs through K + 2 weight updates while all others are fast; 4 groups a batch."""
    slow = first_prompt(1000)
    world = bounded_world(slow_prompt(slow, SPANNED + 0.5), trainer=STEADY, engines=NO_PAUSE)
    return play(world, bounded(mode, 4, groups_per_batch=4), 12), slow


@pytest.mark.parametrize("mode", ["mask", "mask at ship"])
def test_A09_the_age_of_a_rollout_is_that_of_its_oldest_token_and_the_histogram_shows_what_was_masked(mode):
    """A09: token by token, from the span that each version wrote."""
    result, slow = straddling(mode)
    group = next(event.group for event in of(Admitted, result) if event.prompt_id == slow)
    finished = next(event for event in of(Finished, result) if event.group == group)
    assert (finished.head, finished.tail) == (0, SPANNED)
    batch = batch_of(group, result)
    written = Counter()  # tokens of the slow rollout by version: 100 a second
    published = {event.version: event.time for event in of(Published, result)}
    started = next(event.time for event in of(Admitted, result) if event.group == group)
    for token in range(finished.sampled_tokens):
        written[max(version for version, at in published.items() if at <= started + token / 100)] += 1
    masked = {batch.k - version: count for version, count in written.items() if batch.k - version > 4}
    assert masked
    assert dict(batch.masked) == pytest.approx(masked, abs=1)  # a token on the edge of a version
    assert batch.heads[4] >= 1
    assert (batch.rollouts, batch.whole_heads) == (4, 3)
    row = result.rows["metrics"][batch.k]
    assert (row["masked_tokens"], row["token_staleness_max"], row["head_staleness_max"]) == (sum(batch.masked.values()), 4, 4)


@pytest.mark.parametrize("mode", ["drop", "drop at ship"])
def test_A09_a_rollout_that_straddles_more_versions_than_the_bound_is_dropped_whole(mode):
    """A09, as `drop` has it."""
    result, slow = straddling(mode)
    group = next(event.group for event in of(Admitted, result) if event.prompt_id == slow)
    dropped = next(event for event in of(GroupDropped, result) if event.group == group)
    assert dropped.cause == "stale"
    assert all(group not in batch.groups for batch in result.batches.values())
    assert not any(batch.masked for batch in result.batches.values())


def test_A09_a_rollout_that_straddles_more_versions_than_the_bound_holds_the_trainer_up_under_wait():
    """A09, as `wait` has it: it is in the last batch that may have it."""
    result, slow = straddling("wait")
    group = next(event.group for event in of(Admitted, result) if event.prompt_id == slow)
    assert batch_of(group, result).k == 4
    assert not of(GroupDropped, result)


# ----------------------------------------------------------------------------------------------------------------------------- slow prompts

K, SLOW_SECONDS, SLOW_STEPS = 2, 4.5, 200


def a_fifth_slow(mode):
    def seconds(prompt, _):
        return Fixed(SLOW_SECONDS if prompt.fields["number"] % 5 == 0 else 0.5)

    room = {"max_concurrent": 16} if MODES[mode][0] == "ship" else {}  # engines that ship keeps full: what the trainer needs is 10.4
    section = bounded(mode, K, groups_per_batch=8, **room)
    result = play(bounded_world(seconds, prompts=100, trainer=STEADY), section, SLOW_STEPS)
    assert result.seconds / SLOW_STEPS * K < SLOW_SECONDS, "slow means: longer than K update intervals"
    slow = {event.group for event in of(Admitted, result) if int(event.prompt_id.removeprefix("prompt-")) % 5 == 0}
    shipped = [group for event in of(BatchFormed, result) for group in event.groups]
    return result, slow, sum(group in slow for group in shipped) / len(shipped)


@pytest.mark.parametrize("mode", ["mask", "mask at ship"])
def test_A05_slow_prompts_are_not_starved_under_mask(mode):
    """A05: a fifth of the prompts takes longer than K update intervals, and is a fifth of what is trained."""
    result, _, share = a_fifth_slow(mode)
    assert share == pytest.approx(0.2, abs=0.03)
    assert max(Counter((event.prompt_id, event.epoch) for event in of(Admitted, result)).values()) <= 1 + MAX_REQUEUES


def test_A05_slow_prompts_are_not_starved_under_wait():
    """A05: they hold the trainer up instead."""

    def seconds(prompt, _):
        return Fixed(SLOW_SECONDS if prompt.fields["number"] % 5 == 0 else 0.5)

    result = play(bounded_world(seconds, prompts=100, trainer=STEADY), bounded("wait", K, groups_per_batch=8), SLOW_STEPS)
    prompts = Counter()
    groups = {event.group: event.prompt_id for event in of(Admitted, result)}
    for event in of(BatchFormed, result):
        prompts.update(int(groups[group].removeprefix("prompt-")) % 5 == 0 for group in event.groups)
    assert prompts[True] / prompts.total() == pytest.approx(0.2, abs=0.02)
    assert not of(GroupDropped, result)


@pytest.mark.parametrize("mode", ["drop", "drop at ship"])
def test_A05_under_drop_starved_prompts_are_counted_and_given_up_after_a_bounded_number_of_tries(mode):
    """A05: no prompt is tried again more than MAX_REQUEUES times, and every time is in the journal."""
    result, slow, share = a_fifth_slow(mode)
    tries = Counter((event.prompt_id, event.epoch) for event in of(Admitted, result))
    dropped = Counter(event.requeued for event in of(GroupDropped, result) if event.group in slow and event.cause == "stale")
    assert share < 0.15
    assert max(tries.values()) == 1 + MAX_REQUEUES
    assert dropped[True] >= MAX_REQUEUES * dropped[False] > 0
    assert result.ledger.dropped["stale"] >= dropped.total()


@pytest.mark.parametrize("mode", ["mask at ship", "drop at ship"])
def test_A08_complete_groups_over_age_are_evicted_counted_and_tried_again_and_no_step_is_skipped(mode):
    """A08: an entry that became too old in the buffer is no error; the live sets hold no reservation for it."""
    trainer = TrainerSettings(seconds=Fixed(1.0), late={3: 30.0})
    section = bounded(mode, 0, groups_per_batch=8, max_concurrent=16)
    result = play(bounded_world(Fixed(0.3), trainer=trainer), section, 12)
    was_ready = {event.group for event in of(Ready, result)}
    evicted = [event for event in of(GroupDropped, result) if event.group in was_ready]
    assert evicted
    assert all(event.cause == "stale" for event in evicted)
    assert list(result.batches) == list(range(12))
    tries = Counter((event.prompt_id, event.epoch) for event in of(Admitted, result))
    assert 1 < max(tries.values()) <= 1 + MAX_REQUEUES


# -------------------------------------------------------------------------------------------------------------------------- what never ends


def one_hangs(mode, bound, timeout, incomplete):
    """Member 5 of 8 of one prompt hangs; everyone else takes a second."""
    hangs = first_prompt(1000)

    def seconds(prompt, member):
        return Fixed(inf if prompt.id == hangs and member == 5 else 1.0)

    section = bounded(mode, bound, groups_per_batch=4, group_size=8, timeout_seconds=timeout, incomplete=incomplete)
    result = play(bounded_world(seconds, trainer=STEADY), section, 20)
    assert result.reason == "all 20 steps are trained"
    groups = [event for event in of(Admitted, result) if event.prompt_id == hangs]
    lost = [event for event in of(RolloutDropped, result) if event.group == groups[0].group]
    dropped = [event for event in of(GroupDropped, result) if event.group == groups[0].group]
    return result, groups, lost, dropped


@pytest.mark.parametrize("incomplete", ["partial", "drop"])
@pytest.mark.parametrize("mode", MODES)
def test_D01_a_member_that_never_returns_ends_at_its_deadline_and_its_group_is_resolved(mode, incomplete):
    """D01: rollout 5 of 8 hangs in one group."""
    result, groups, lost, dropped = one_hangs(mode, 8, 6.0, incomplete)
    assert [(event.member, event.cause, event.time) for event in lost] == [(5, "timeout", groups[0].time + 6.0)]
    if incomplete == "drop":
        assert [event.cause for event in dropped] == ["incomplete"]
    else:
        assert batch_of(groups[0].group, result).rollouts == 4 * 8 - 1


@pytest.mark.parametrize("mode", MODES)
def test_D01_a_member_that_hangs_past_the_bound_does_not_hold_the_step_up_for_longer_than_its_deadline(mode):
    """D01, where the deadline is later than K updates: wait waits for it, drop does not, and mask finds nothing left to train on."""
    result, groups, lost, dropped = one_hangs(mode, 2, 8.0, "partial")
    if mode == "wait":
        assert batch_of(groups[0].group, result).k == 2
        assert next(event.time for event in of(BatchFormed, result) if event.k == 2) == groups[0].time + 8.0
        return
    assert [event.cause for event in dropped] == ["stale"]
    assert bool(lost) == mode.startswith("mask")
    assert dropped[0].time >= groups[0].time + 8.0 if lost else dropped[0].time < groups[0].time + 8.0
    assert 1 < len(groups) <= 1 + MAX_REQUEUES, "the prompt is tried again, a bounded number of times"
