"""Single decisions held against the rules, each in a state that says by itself what they ask for; and what a resume gives up."""

import msgspec
import pytest
from folded import completed

from headway.events import Admitted, BatchFormed, Continued, EvalStarted, GroupDropped, Ingested, PromptDropped, Published, Resumed
from headway.rules.admission import GateLimits, limits_of
from headway.rules.batching import MAX_REQUEUES
from headway.rules.ledger import Ledger, apply
from headway.rules.verdict import Judge
from headway.rules.view import ResumeBudget, Unit
from headway.settings import RolloutSection, RunSection
from headway.sim.distributions import Lognormal
from headway.sim.engine import EngineSettings
from headway.sim.run import WorldSettings, simulate
from headway.sim.trainer import TrainerSettings
from headway.sim.worker import RolloutSettings
from headway.sim.world import Kill

LIMITS = GateLimits(groups_per_batch=2, group_size=1, max_concurrent=100, steps_ahead=2.0, steps=100, max_staleness=2)


def limits(**more):
    return msgspec.structs.replace(LIMITS, **more)


def ledger(ready=(), running=(), *, version=5, **more):
    """Groups by birth, their ids in that order, at version `version` with all of it trained."""
    now = Ledger(version=version, next_batch=version, trained=version, **more)
    for births, units, ended in ((ready, now.ready, 1), (running, now.running, 0)):
        for birth in births:
            units[now.next_group] = Unit(f"p{now.next_group}", 0, birth, 1, ended=ended)
            now.births[birth] = now.births.get(birth, 0) + 1
            if units is now.ready:
                now.ready_births[birth] = now.ready_births.get(birth, 0) + 1
            now.next_group += 1
    now.rollouts_in_flight = len(now.running)
    return now


def said(now, event, **more):
    return Judge(limits(**more)).divergence(now, event)


def admission(now):
    return Admitted(0.0, now.next_group, "p", 0, 1, now.version)


def stale(group, *, requeued=True):
    return GroupDropped(0.0, group, "stale", "", 0, requeued)


def test_while_a_run_drains_nothing_is_admitted():
    now = ledger(draining="asked to")
    assert said(now, admission(now)) == "group 0 is admitted, and the run drains: asked to"
    assert said(ledger(), admission(ledger())) == ""


def test_what_is_admitted_after_a_resume_is_counted_apart_from_the_live_sets():
    """The gate is open, as far as it can tell: its live sets have lost groups that were admitted."""
    budget = ResumeBudget(5, 5, 0, admitted=6)
    now = ledger(resume_budget=budget)
    assert said(now, admission(now)) == (
        "the run was taken up at version 5 with batch 5 next: 6 groups were admitted since (less those dropped), "
        "and batches to 7 have room for 6"
    )
    budget.admitted = 5
    assert said(now, admission(now)) == ""
    budget.admitted, budget.taken = 7, 2  # a batch sized by tokens took two more than Bmin
    assert said(now, admission(now)) == ""
    budget.admitted = 99
    assert said(now, admission(now), enforce="ship") == "", "at the shipper admission is bounded by what is ready"


@pytest.mark.parametrize(("k", "place"), [(5, ""), (6, "in batch 5")])
def test_a_place_is_the_earliest_that_can_be_spared(k, place):
    expected = f"group 0 is given a place in batch {k}; by the rules, {place}" if place else ""
    assert said(ledger(), Ingested(0.0, 0, "theirs", "external", 1, k), replayed_groups=1) == expected


def test_where_no_batch_can_spare_a_group_there_is_no_place():
    found = said(ledger(exhausted=True), Ingested(0.0, 0, "theirs", "external", 1, 5), replayed_groups=1)
    assert found == "group 0 is given a place in batch 5; by the rules, nowhere"


def test_a_batch_that_would_leave_groups_without_room_in_time_waits():
    now = ledger([5, 5], [3, 3, 3])  # two are ready, and three others are due by batch 5
    formed = BatchFormed(0.0, 5, (0, 1), 0.0)
    assert (
        said(now, formed, on_stale="wait")
        == "batch 5 is formed; by the rules it may not be yet: it would leave groups without room in time"
    )
    assert said(now, formed) == "", "a mask asks for no more than enough ready groups"


def test_many_groups_are_named_by_the_first_of_them():
    now = ledger([5, 5], [3] * 10)
    found = said(now, BatchFormed(0.0, 5, (0, 1), 0.0), on_stale="drop")
    assert found == "batch 5 is formed; by the rules groups 11, 10, 9, 8, 7, 6, 5, 4 and 2 more must go first"
    now = ledger([5, 5], [3])
    assert said(now, BatchFormed(0.0, 5, (0, 1), 0.0), on_stale="drop") == "batch 5 is formed; by the rules group 2 must go first"


def test_a_prompt_that_went_stale_often_enough_is_not_tried_again():
    again = {("p0", 0): MAX_REQUEUES - 1}
    assert said(ledger([2], requeued=again), stale(0)) == ""
    often = {("p0", 0): MAX_REQUEUES}
    assert said(ledger([2], requeued=often), stale(0, requeued=False)) == ""
    assert (
        said(ledger([2], requeued=often), stale(0))
        == "group 0 is dropped as stale for the 4. time; by the rules its prompt is not tried again"
    )


def test_a_group_that_runs_has_younger_tokens_to_come_and_one_that_is_gone_is_nobody_s():
    now = ledger([], [2])
    assert said(now, stale(0)) == "group 0 is dropped as stale before batch 5; by the rules its tokens of version -1 may still train"
    apply(now, GroupDropped(0.0, 0, "incomplete", "", 0))
    assert said(now, stale(0)) == "", "it changes nothing"


def test_drop_says_of_a_group_that_is_in_nobody_s_way_who_is():
    now = ledger([5, 5], [3, 5])
    assert said(now, stale(2), on_stale="drop") == ""
    assert said(now, stale(3), on_stale="drop") == "group 3 (birth 5) is dropped as stale; by the rules group 2"


def test_at_the_shipper_ready_groups_over_age_are_in_the_way_too():
    now, at_ship = ledger([2, 3, 5], [2]), {"on_stale": "drop", "enforce": "ship"}
    assert said(now, stale(0), **at_ship) == said(now, stale(3), **at_ship) == ""
    assert said(now, stale(1), **at_ship) == "group 1 (birth 3) is dropped as stale; by the rules groups 0, 3"


def test_an_evaluation_is_of_the_version_that_is_served():
    assert said(ledger(), EvalStarted(0.0, 5, 8)) == ""
    assert said(ledger(), EvalStarted(0.0, 4, 8)) == "version 4 is evaluated, and version 5 is served"


# ---- taken up again ----------------------------------------------------------------------------------------------------------------


def judged(*events, mode, **more):
    """Return what is said of each of these events, once groups 0 to 2 are ready and groups 3 and 4 run, all of birth 5."""
    now, judge = Ledger(version=5, next_batch=5, trained=5, **more), Judge(None)
    before = [event for number in range(3) for event in completed(number, 5)]
    before += [Admitted(0.0, number, f"p{number}", 0, 1, 5) for number in (3, 4)]
    found = []
    for event in [*before, *events]:
        found.append(judge.divergence(now, event))
        apply(now, event)
        if event is before[-1]:
            judge.limits = limits(on_stale=mode)
    assert found[: len(before)] == [""] * len(before)
    return found[len(before) :]


@pytest.mark.parametrize("mode", ["wait", "drop", "mask"])
def test_what_a_resume_gives_up_is_taken_as_told(mode):
    """Of a batch sized by tokens that was lost on its way to the disk more groups come back than Bmin has room for. And a prompt that
    went stale often is tried again all the same: that the process ended is no fault of its own."""
    events = [Resumed(0.0, 5, 5, "line"), Continued(0.0, 3), stale(0), stale(2), stale(4)]
    assert judged(*events, mode=mode, requeued={("p0", 0): MAX_REQUEUES}) == [""] * 5
    assert all(judged(stale(0), mode=mode)), "without a resume that is nothing that the rules would do"


def test_what_is_given_up_once_the_run_goes_on_is_judged_again():
    events = [Resumed(0.0, 5, 5, "line"), stale(0), PromptDropped(0.0, "p0", 0, "missing", ""), Published(0.0, 5, ("e",)), stale(2)]
    assert judged(*events, mode="drop") == ["", "", "", "", "group 2 (birth 5) is dropped as stale; by the rules none"]


@pytest.mark.parametrize("mode", ["wait", "drop"])
def test_a_run_that_lost_a_batch_sized_by_tokens_on_its_way_to_the_disk_is_what_the_rules_decide(mode):
    """That batch took more groups than Bmin: killed before it lies on disk, the run has no room in time for all of them."""
    rollout = RolloutSection(
        groups_per_batch=1,
        group_size=2,
        batch_tokens=400,
        max_rollout_tokens=100,
        max_concurrent=60,
        max_staleness=2,
        steps_ahead=2,
        on_stale=mode,
        timeout_seconds=1000.0,
    )
    world = WorldSettings(
        seed=20,
        rollouts=RolloutSettings(seconds=Lognormal(1.0, 1.2)),
        engines=[EngineSettings(commit_seconds=0.1)],
        trainer=TrainerSettings(seconds=Lognormal(1.0, 0.2)),
    )
    kills = [Kill(at=5.0), Kill(at=8.6, trainer_dies=True, weights_lost=2)]
    run = RunSection(steps=12, max_uncovered_batches=0, max_empty_batches=1000)
    events = simulate(world, rollout, run, kills=kills, interleaving=20).events
    given_up = [event for event in events if isinstance(event, GroupDropped) and event.cause == "stale" and "have no room" in event.detail]
    assert given_up, "the history gives nothing up for want of room: the test needs another world"
    now, judge = Ledger(), Judge(limits_of(rollout, run.steps))
    for event in events:
        assert judge.divergence(now, event) == ""
        apply(now, event)
