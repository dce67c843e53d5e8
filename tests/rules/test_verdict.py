"""Retracing: whatever history a run wrote is what the rules decide again, and a history that was changed is found out."""

from functools import cache

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.events import (
    Admitted,
    BatchAcknowledged,
    BatchFormed,
    EvalStarted,
    Finished,
    GroupDropped,
    PaceChanged,
    Published,
    Ready,
)
from headway.rules.admission import limits_of
from headway.rules.ledger import Ledger, apply
from headway.rules.verdict import Judge
from headway.settings import EvalSection, RolloutSection, RunSection
from headway.sim.distributions import Fixed, Lognormal, Uniform
from headway.sim.engine import EngineSettings
from headway.sim.run import WorldSettings, simulate
from headway.sim.trainer import TrainerSettings
from headway.sim.worker import Fault, RolloutSettings
from headway.sim.world import Kill

STEPS = 12


def section(**more):
    return RolloutSection(**{"groups_per_batch": 4, "group_size": 2, "max_concurrent": 30, "max_staleness": 2, "steps_ahead": 2} | more)


def history(rollout, world, **how):
    return simulate(world, rollout, RunSection(steps=STEPS, max_uncovered_batches=0), **how).events


def divergences(events, rollout, steps=STEPS):
    ledger, judge, found = Ledger(), Judge(None if rollout is None else limits_of(rollout, steps)), []
    for number, event in enumerate(events):
        if said := judge.divergence(ledger, event):
            found.append((number, said))
        try:
            apply(ledger, event)
        except ValueError as error:
            return [*found, (number, str(error))]
    return found


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    mode=st.sampled_from(["mask", "wait", "drop", "train"]),
    bound=st.integers(1, 3),
    ahead=st.sampled_from([1.0, 0.5, "auto"]),
    latency=st.sampled_from([Fixed(1.0), Uniform(0.5, 4.0), Lognormal(1.0, 1.2)]),
    concurrent=st.integers(2, 40),
    commit_seconds=st.sampled_from([0.0, 0.4]),
    failing=st.sampled_from([0.0, 0.2]),
    kills=st.lists(st.builds(Kill, at=st.floats(1, 12), trainer_dies=st.booleans(), weights_lost=st.integers(0, 2)), max_size=2),
    seed=st.integers(0, 9),
)
def test_every_history_of_a_run_is_what_the_rules_decide_again(
    mode, bound, ahead, latency, concurrent, commit_seconds, failing, kills, seed
):
    kills = sorted(kills, key=lambda kill: kill.at)
    rollout = section(on_stale=mode, max_staleness=bound, steps_ahead=ahead, max_concurrent=concurrent, timeout_seconds=1000.0)
    world = WorldSettings(
        seed=seed,
        rollouts=RolloutSettings(seconds=latency, faults=(Fault("environment_error", failing),)),
        engines=[EngineSettings(commit_seconds=0.1)],
        trainer=TrainerSettings(seconds=Lognormal(1.0, 0.2)),
        commit_seconds=commit_seconds,
        eval_prompts=4,
    )
    events = history(rollout, world, kills=kills, evaluation=EvalSection(every=5, prompts="held_out"), interleaving=seed)
    assert divergences(events, rollout) == []


@cache
def told(mode="mask", **more):
    rollout = section(on_stale=mode, **more)
    world = WorldSettings(
        rollouts=RolloutSettings(seconds=Lognormal(1.0, 1.2)), engines=[EngineSettings(commit_seconds=0.1)], eval_prompts=2
    )
    return rollout, history(rollout, world, evaluation=EvalSection(every=5, prompts="held_out"))


def position(events, kind, number=3, **fields):
    places = [index for index, event in enumerate(events) if isinstance(event, kind)]
    return [place for place in places if all(getattr(events[place], name) == value for name, value in fields.items())][number]


def changed(events, place, **fields):
    return [*events[:place], msgspec.structs.replace(events[place], **fields), *events[place + 1 :]]


def moved(events, place, to):
    event = events[place]
    rest = [*events[:place], *events[place + 1 :]]
    return [*rest[:to], event, *rest[to:]]


def first(events, rollout):
    found = divergences(events, rollout)
    assert found, "nothing was found out"
    return found[0]


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (Admitted, {"birth": 9}, "is born at version 9, and version"),
        (Admitted, {"members": 5}, "has 5 members, and rollout.group_size is 2"),
        (Finished, {"tail": 99}, "has tokens of version 99, and the newest is"),
        (BatchAcknowledged, {"k": 2}, "batch 2 is trained, and the next to be trained is 3"),
        (Published, {"version": 50}, "version 50 is published after"),
        (EvalStarted, {"version": 1}, "version 1 is evaluated, and version"),
        (BatchFormed, {"groups": ()}, "holds none; by the rules groups"),
    ],
)
def test_an_event_that_was_changed_is_found_out_where_it_stands(kind, fields, said):
    rollout, events = told()
    place = position(events, kind, 1 if kind is EvalStarted else 3)
    number, found = first(changed(events, place, **fields), rollout)
    assert number == place
    assert said in found


def test_a_batch_with_its_groups_in_another_order_and_one_with_other_groups():
    rollout, events = told()
    place = position(events, BatchFormed)
    groups = events[place].groups
    assert first(changed(events, place, groups=groups[::-1]), rollout) == (
        place,
        "batch 3 holds its groups in another order than the rules put them",
    )
    number, found = first(changed(events, place, groups=(*groups[:-1], 10**6)), rollout)
    assert number == place
    assert found == f"batch 3 holds group 1000000; by the rules group {groups[-1]}"


def test_a_batch_that_was_formed_before_its_time():
    rollout, events = told()
    place = position(events, BatchFormed)
    ready = max(index for index, event in enumerate(events[:place]) if isinstance(event, Ready))
    _, found = first(moved(events, place, ready), rollout)
    assert "by the rules it may not be yet: too few groups are ready" in found


def test_a_batch_that_was_formed_further_ahead_than_it_may():
    rollout = section(steps_ahead=2)
    events = history(rollout, WorldSettings(rollouts=RolloutSettings(seconds=Fixed(0.1)), trainer=TrainerSettings(seconds=Fixed(2.0))))
    assert divergences(events, rollout) == []
    _, found = first(events, msgspec.structs.replace(rollout, max_lead=0))
    assert found == "batch 1 is formed 1 ahead of training, and rollout.max_lead is 0"


def test_an_admission_for_which_there_was_no_room():
    rollout, events = told()
    tight = msgspec.structs.replace(rollout, max_concurrent=10)
    _, found = first(events, tight)
    assert found.endswith("is admitted; by the rules none may start: concurrency")
    _, found = first(events, msgspec.structs.replace(rollout, steps_ahead=1.0))
    assert found.endswith("is admitted; by the rules none may start: staleness")


def test_a_group_that_is_ready_before_its_members_have_ended():
    rollout, events = told()
    place = position(events, Ready)
    last = max(index for index, event in enumerate(events[:place]) if isinstance(event, Finished) and event.group == events[place].group)
    number, found = first(moved(events, place, last), rollout)
    assert number == last
    assert "is ready, and 1 of its 2 members have not ended" in found


def test_a_group_that_may_still_train_is_not_stale():
    rollout, events = told()
    place = position(events, BatchFormed)
    dropped = GroupDropped(events[place].time, events[place].groups[0], "stale", "", 0, requeued=True)
    number, found = first([*events[:place], dropped, *events[place:]], rollout)
    assert number == place
    assert "may still train" in found
    _, found = first(changed([*events[:place], dropped, *events[place:]], place, requeued=False), rollout)
    assert "by the rules its prompt is tried again" in found


def test_drop_cancels_what_is_in_the_way_and_nothing_else():
    rollout, events = told("drop")
    stale = [index for index, event in enumerate(events) if isinstance(event, GroupDropped) and event.cause == "stale"]
    assert stale, "the history drops nothing: the test needs another world"
    without = [event for index, event in enumerate(events) if index != stale[0]]
    _, found = first(without, rollout)
    assert "must go first" in found
    place = position(events, BatchFormed, 6)
    newest = max(event.group for event in events[:place] if isinstance(event, Admitted))
    dropped = GroupDropped(events[place].time, newest, "stale", "", 0, requeued=True)
    assert any(
        "is dropped as stale; by the rules none" in said for _, said in divergences([*events[:place], dropped, *events[place:]], rollout)
    )


def test_a_pace_of_somebody_else():
    rollout = section(steps_ahead="auto", max_staleness=3)
    world = WorldSettings(rollouts=RolloutSettings(seconds=Uniform(1.0, 5.0)), trainer=TrainerSettings(seconds=Fixed(1.0)))
    events = simulate(world, rollout, RunSection(steps=40)).events
    place = position(events, PaceChanged, 0)
    assert divergences(events, rollout, 40) == []
    number, found = first(changed(events, place, steps_ahead=1.25), rollout)
    assert number == place
    assert "steps_ahead goes from 2 to 1.25; by the rules, to" in found


def test_under_an_unknown_config_only_what_holds_under_any_is_judged():
    _, events = told()
    assert divergences(events, None) == []
    place = position(events, Published)
    assert first(changed(events, place, version=50), None)[0] == place


def test_what_cannot_be_folded_is_a_divergence_too():
    rollout, events = told()
    place = position(events, BatchFormed)
    assert "is formed where batch" in divergences(changed(events, place, k=9), rollout)[-1][1]
