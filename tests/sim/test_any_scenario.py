"""Whatever a scenario says, playing it keeps the bound, loses no group and no token, and gives the same history twice."""

import itertools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.errors import EmptyBatches
from headway.events import Admitted, EvalFinished, Finished, GroupDropped, RolloutDropped
from headway.settings import RolloutSection
from headway.sim.distributions import Fixed, Lognormal, Pareto, Uniform
from headway.sim.play import play
from headway.sim.scenario import (
    EvaluationSection,
    Failing,
    Fault,
    FleetSection,
    LengthSection,
    Scenario,
    TrainingSection,
    WorkloadSection,
)

STEPS = 5
KINDS = ("engine_dies", "trainer_stalls", "trainer_dies", "orchestrator_dies")


@st.composite
def workloads(draw):
    return WorkloadSection(
        tokens=draw(st.sampled_from([Fixed(80.0), Lognormal(120.0, 1.0), Pareto(100.0, 2.0), 50.0])),
        prompt_tokens=draw(st.sampled_from([30.0, Uniform(1, 200)])),
        turns=draw(st.integers(1, 3)),
        tool_seconds=draw(st.sampled_from([0.0, Uniform(0.0, 9.0)])),
        observed_tokens=draw(st.sampled_from([0, 25])),
        score_seconds=draw(st.sampled_from([0.0, 3.0])),
        zero_advantage_share=draw(st.sampled_from([0.0, 0.2])),
        filtered_share=draw(st.sampled_from([0.0, 0.25])),
        failures=draw(st.sampled_from([(), (Failing(cause="environment_error", share=0.15),)])),
    )


@st.composite
def fleets(draw):
    return FleetSection(
        engines=draw(st.integers(1, 3)),
        tokens_per_second=20.0,
        half_speed_at=draw(st.sampled_from([0.0, 6.0])),
        prefill_tokens_per_second=draw(st.sampled_from([0.0, 400.0])),
        max_sequences=draw(st.sampled_from([0, 5])),
        kv_tokens=draw(st.sampled_from([0, 700])),
        sync_seconds=draw(st.sampled_from([0.0, Uniform(0.1, 4.0)])),
        weight_sync=draw(st.sampled_from(["in_flight", "wait", "abort_resume"])),
        recompute_kv=draw(st.booleans()),
        sync_order=draw(st.sampled_from(["all_at_once", "rolling"])),
        on_lost=draw(st.sampled_from(["continue", "restart"])),
    )


@st.composite
def rollouts(draw):
    bound, mode = draw(st.integers(1, 4)), draw(st.sampled_from(["mask", "wait", "drop"]))
    return RolloutSection(
        groups_per_batch=draw(st.integers(1, 4)),
        group_size=draw(st.integers(2, 4)),
        max_concurrent=draw(st.sampled_from([4, 16, 64])),
        max_staleness=bound,
        steps_ahead=draw(st.sampled_from([None, float(bound), "auto"])),
        on_stale=mode,
        enforce=draw(st.sampled_from(["admission", "ship"])) if mode != "wait" else "admission",
        timeout_seconds=draw(st.sampled_from([40.0, 3600.0])),
        max_attempts=draw(st.sampled_from([1, 3])),
    )


FAULTS = st.builds(
    Fault,
    at_seconds=st.integers(0, 1200).map(lambda tenths: tenths / 10),
    what=st.sampled_from(KINDS),
    for_seconds=st.integers(5, 700).map(lambda tenths: tenths / 10),
    engine=st.integers(0, 2),
)
SCENARIOS = st.builds(
    Scenario,
    workload=workloads(),
    training=st.builds(
        TrainingSection,
        seconds=st.sampled_from([0.5, 5.0, Uniform(1, 9)]),
        tokens_per_second=st.sampled_from([0.0, 300.0]),
        jitter=st.sampled_from([0.0, 0.3]),
    ),
    fleet=fleets(),
    rollout=rollouts(),
    run=st.builds(LengthSection, steps=st.just(STEPS), seed=st.integers(0, 5)),
    eval=st.none() | st.just(EvaluationSection(every=2, prompts=3, hold_seconds=5.0, at_start=True)),
    faults=st.lists(FAULTS, max_size=4).map(tuple),
)


def tokens(events, kind):
    return sum(event.sampled_tokens for event in events if isinstance(event, kind) and not getattr(event, "finished", False))


@given(SCENARIOS)
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_any_scenario_keeps_the_bound_and_loses_nothing(scenario):
    try:
        played = play(scenario, limit_seconds=1e5)
    except EmptyBatches:  # every rollout took longer than rollout.timeout_seconds, say
        return
    result, ledger = played.result, played.result.ledger
    assert ledger.trained >= STEPS  # more: the trainer went on while the orchestrator was down
    assert result.max_staleness <= scenario.rollout.max_staleness

    events = result.events
    trained = [group for k in range(ledger.next_batch) for group in result.batches[k].groups]
    dropped = [event.group for event in events if isinstance(event, GroupDropped)]
    ended = [*trained, *dropped, *ledger.running, *ledger.ready]
    assert sorted(ended) == sorted(event.group for event in events if isinstance(event, Admitted))

    delivered = sum(tokens(events, kind) for kind in (Finished, RolloutDropped, EvalFinished))
    undelivered = sum(count for _, count in played.undelivered)
    assert result.sampled_tokens == delivered + undelivered + played.in_progress + played.eval_in_progress
    for intervals in [played.trainer, played.gate, *played.engines.values()]:
        assert (intervals[0].start, intervals[-1].end) == (0.0, played.end)
        assert all(one.end == other.start for one, other in itertools.pairwise(intervals))


@given(SCENARIOS)
@settings(deadline=None, max_examples=5, suppress_health_check=[HealthCheck.too_slow])
def test_the_same_scenario_gives_the_same_history(scenario):
    try:
        one, other = play(scenario, limit_seconds=1e5), play(scenario, limit_seconds=1e5)
    except EmptyBatches:
        return
    assert one.result.events == other.result.events
    assert (one.trainer, one.gate, one.engines, one.undelivered) == (other.trainer, other.gate, other.engines, other.undelivered)
