"""The stage that a stall is blamed on: always one, always one that holds work; and what counts as progress."""

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import events
from headway.events import AnyEvent, EngineState, RolloutDropped
from headway.rules.admission import CapacityReason, GateLimits
from headway.rules.ledger import Ledger
from headway.rules.stall import OPEN_REASONS, Scene, Stage, blocked_stage, moves, report
from headway.rules.view import Promise, Unit

LIMITS = GateLimits(groups_per_batch=2, group_size=2, max_concurrent=8, steps_ahead=1.0, steps=10)
REASONS = typing.get_args(CapacityReason)


def ledger_of(*, version=0, trained=0, next_batch=0, running=(), ready=0, evaluating=None, draining=""):
    """`running`: how many of its two members have ended, by group."""
    units = {group: Unit(f"p{group}", 0, 0, 2, ended=ended) for group, ended in enumerate(running)}
    done = {100 + group: Unit(f"q{group}", 0, 0, 2, ended=2) for group in range(ready)}
    return Ledger(
        version=version,
        trained=trained,
        next_batch=next_batch,
        running=units,
        ready=done,
        rollouts_in_flight=sum(2 - ended for ended in running),
        eval_running=evaluating,
        draining=draining,
    )


def blamed(ledger, **scene):
    return blocked_stage(ledger, LIMITS, Scene(**{"idle_seconds": 60.0, "capacity_reason": "staleness", **scene})).stage


def test_who_holds_work_is_blamed():
    assert blamed(ledger_of(), late_seconds=59.0) == "event loop"
    assert blamed(ledger_of(running=[1]), journal_seconds=60.0) == "journal"
    assert blamed(ledger_of(next_batch=1), writing_seconds=60.0) == "batch writing"
    assert blamed(ledger_of(next_batch=1)) == "sink"
    assert blamed(ledger_of(next_batch=1), handed_over=1) == "trainer"
    assert blamed(ledger_of(running=[2, 1])) == "sink"
    assert blamed(ledger_of(running=[2, 1]), scored_apart=True) == "scorer"
    assert blamed(ledger_of(), finished_queue=1) == "sink"
    assert blamed(ledger_of(ready=2)) == "sink"
    assert blamed(ledger_of(running=[1])) == "environment or engine"
    assert blamed(ledger_of(evaluating=0), eval_in_flight=3) == "evaluation"
    assert blamed(ledger_of(), capacity=2, capacity_reason="open") == "prompts"
    assert blamed(ledger_of()) == "admission"


def test_a_version_that_is_not_served_is_the_sync_s_or_that_of_the_evaluation_it_waits_for():
    assert blamed(ledger_of(version=-1)) == "weight sync"
    assert blamed(ledger_of(), syncing=True) == "weight sync"
    assert blamed(ledger_of(trained=2, next_batch=2)) == "weight sync"
    assert blamed(ledger_of(trained=2, next_batch=2, evaluating=0)) == "evaluation"
    assert blamed(ledger_of(version=1, trained=2, next_batch=2), publish_lag=1) == "admission"
    assert blamed(ledger_of(version=0, trained=2, next_batch=2), publish_every=3) == "admission"
    assert blamed(ledger_of(version=0, trained=3, next_batch=3), publish_every=3) == "weight sync"


def test_a_run_that_drains_is_to_serve_what_was_trained_last_and_starts_nothing():
    assert blamed(ledger_of(version=0, trained=2, next_batch=2, draining="asked to"), publish_every=3) == "weight sync"
    assert blamed(ledger_of(version=2, trained=2, next_batch=2, draining="asked to"), publish_every=3) == "admission"
    assert blamed(ledger_of(draining="asked to"), capacity=2, capacity_reason="draining") == "admission"


def test_a_scorer_that_is_slow_is_blamed_whether_its_group_has_ended_or_an_evaluation_waits_for_it():
    assert blamed(ledger_of(running=[1]), scored_apart=True, scoring_seconds=60.0) == "scorer"
    assert blamed(ledger_of(evaluating=0), scored_apart=True, scoring_seconds=60.0) == "scorer"
    assert blamed(ledger_of(evaluating=0)) == "evaluation", "between two of its rollouts"


def test_a_call_that_began_lately_is_not_what_everybody_waits_for():
    assert blamed(ledger_of(running=[1]), journal_seconds=5.0) == "environment or engine"
    assert blamed(ledger_of(running=[1]), scored_apart=True, scoring_seconds=5.0) == "environment or engine"
    assert blamed(ledger_of(running=[1]), late_seconds=5.0) == "environment or engine"


@pytest.mark.parametrize("reason", ["paused", "the disk is full"])
def test_a_gate_that_somebody_keeps_shut_explains_only_that_nothing_starts(reason):
    assert blamed(ledger_of(), capacity_reason=reason) == "paused"
    assert blamed(ledger_of(running=[1]), capacity_reason=reason) == "environment or engine"
    assert blamed(ledger_of(next_batch=1), handed_over=1, capacity_reason=reason) == "trainer"


def test_a_run_that_is_paused_is_said_to_wait_and_not_to_be_stalled():
    scene = Scene(idle_seconds=60.0, capacity_reason="paused")
    line = report(blocked_stage(ledger_of(), LIMITS, scene), ledger_of(), LIMITS, scene)
    assert line.startswith("nothing has moved for 60 s; the run waits: paused; ")
    assert "stalled" not in line


def test_every_reason_of_the_gate_but_a_pause_is_one_of_a_run_under_way():
    assert set(REASONS) >= OPEN_REASONS
    assert "paused" in set(REASONS) - OPEN_REASONS


seconds = st.sampled_from([0.0, 1.0, 29.0, 60.0, 300.0])
counts = st.integers(0, 3)
SCENES = st.builds(
    Scene,
    idle_seconds=st.sampled_from([60.0, 300.0]),
    late_seconds=seconds,
    journal_seconds=seconds,
    writing_seconds=seconds,
    scoring_seconds=seconds,
    syncing=st.booleans(),
    scored_apart=st.booleans(),
    publish_lag=counts,
    handed_over=counts,
    eval_in_flight=counts,
    finished_queue=counts,
    batch_queue=counts,
    capacity=counts,
    capacity_reason=st.sampled_from(REASONS),
    engines=st.dictionaries(st.sampled_from(["e0", "e1"]), st.just("serving x-0")),
)
LEDGERS = st.builds(
    ledger_of,
    version=st.integers(-1, 3),
    trained=counts,
    next_batch=counts,
    running=st.lists(st.integers(0, 2), max_size=3),
    ready=counts,
    evaluating=st.none() | counts,
    draining=st.sampled_from(["", "asked to"]),
)


@given(LEDGERS, SCENES)
def test_whatever_there_is_to_see_a_stage_is_named_that_holds_work(ledger, scene):
    stage, detail = msgspec.structs.astuple(blocked_stage(ledger, LIMITS, scene))
    assert stage in typing.get_args(Stage)
    held = {
        "event loop": scene.late_seconds > 0,
        "journal": scene.journal_seconds > 0,
        "batch writing": scene.writing_seconds > 0,
        "weight sync": scene.syncing or ledger.version < max(0, ledger.trained - scene.publish_lag),
        "trainer": scene.handed_over > ledger.trained,
        "scorer": scene.scored_apart,
        "sink": ledger.next_batch > ledger.trained or bool(ledger.running or ledger.ready or scene.finished_queue),
        "environment or engine": ledger.rollouts_in_flight > 0,
        "evaluation": scene.eval_in_flight > 0 or ledger.eval_running is not None,
        "prompts": scene.capacity > 0,
        "admission": scene.capacity_reason in OPEN_REASONS,
        "paused": scene.capacity_reason not in OPEN_REASONS,
    }
    assert held[stage]
    line = report(blocked_stage(ledger, LIMITS, scene), ledger, LIMITS, scene)
    assert "\n" not in line
    assert detail in line
    assert ("stalled: " in line) == (stage != "paused")


def test_progress_is_what_changes_the_state_of_work():
    """A retry moves nothing, nor does a choice of the pacer or a note; everything else that is an event does."""
    still = {"PaceChanged", "ConfigChanged", "Ended", "RolloutDropped"}
    for kind in typing.get_args(AnyEvent):
        if kind is RolloutDropped:
            continue
        names = kind.__struct_fields__
        event = kind(*(0.0 if name == "time" else 0 for name in names))
        assert moves(event) == (kind.__name__ not in still), kind
    assert moves(RolloutDropped(0.0, 0, 0, 2, "timeout", "", 0, final=True))
    assert not moves(RolloutDropped(0.0, 0, 0, 0, "timeout", "", 0, final=False))
    assert moves(EngineState(0.0, "e", "lost", ""))
    assert events.Admitted in typing.get_args(AnyEvent)


def test_a_promised_place_is_no_work_of_the_sink_before_it_is_durable():
    ledger = ledger_of(ready=1)
    ledger.ingested[7] = Promise(0)
    ledger.promised[0] = ledger.awaited[0] = 1
    assert blamed(ledger) == "admission"
