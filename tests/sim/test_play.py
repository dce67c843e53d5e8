"""Scenarios are played by the real components: nothing is lost, no bound is broken, and what is noted is what happened."""

from itertools import pairwise

import msgspec
import pytest

from headway.errors import EmptyBatches
from headway.events import Admitted, BatchAcknowledged, BatchFormed, Draining, EvalFinished, Finished, GroupDropped, RolloutDropped
from headway.settings import RolloutSection
from headway.sim.distributions import Fixed, Lognormal, Uniform
from headway.sim.figures import summarise
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
    warm_up_of,
)

STEPS, S = 12, 3
B = G = 4
ROLLOUT = RolloutSection(groups_per_batch=B, group_size=G, max_concurrent=96, max_staleness=S)
FLEET = FleetSection(engines=2, tokens_per_second=20.0, sync_seconds=0.5)
LOADED = FleetSection(
    engines=2,
    tokens_per_second=20.0,
    half_speed_at=10.0,
    prefill_tokens_per_second=900.0,
    max_sequences=24,
    kv_tokens=5000,
    sync_seconds=Uniform(0.2, 0.9),
)
WORK = WorkloadSection(tokens=Lognormal(200.0, 0.8), prompt_tokens=Uniform(20, 60))
TRAINING = TrainingSection(seconds=4.0, tokens_per_second=1500.0, jitter=0.1)


def scenario(**more):
    given = {"workload": WORK, "training": TRAINING, "fleet": FLEET, "rollout": ROLLOUT, "run": LengthSection(steps=STEPS)}
    return Scenario(**{**given, **more})


def changed(section, **more):
    return msgspec.structs.replace(section, **more)


def of(played, kind):
    return [event for event in played.result.events if isinstance(event, kind)]


WORLDS = {
    "fixed speed": scenario(),
    "under load": scenario(fleet=LOADED),
    "a small cache": scenario(fleet=changed(LOADED, kv_tokens=1500, max_sequences=0)),
    "turns and tools": scenario(
        fleet=LOADED, workload=changed(WORK, turns=3, tool_seconds=Lognormal(5.0, 1.0), observed_tokens=30, score_seconds=2.0)
    ),
    "failures and timeouts": scenario(
        fleet=LOADED,
        workload=changed(
            WORK, failures=(Failing(cause="environment_error", share=0.1), Failing(cause="bad_reward", share=0.03, retried=False))
        ),
        rollout=changed(ROLLOUT, timeout_seconds=60.0),
    ),
    "groups that score alike": scenario(workload=changed(WORK, zero_advantage_share=0.3), rollout=changed(ROLLOUT, dynamic_sampling=True)),
    "groups that a filter refuses": scenario(workload=changed(WORK, filtered_share=0.4)),
    "evaluations": scenario(fleet=LOADED, eval=EvaluationSection(every=2, prompts=8, n=2, at_start=True)),
    "aborted at syncs": scenario(fleet=changed(LOADED, weight_sync="abort_resume", recompute_kv=False)),
    "syncs that wait": scenario(fleet=changed(LOADED, weight_sync="wait", sync_order="rolling")),
    "groups that are dropped": scenario(fleet=LOADED, rollout=changed(ROLLOUT, on_stale="drop", steps_ahead=S, max_staleness=S)),
    "batches that wait": scenario(fleet=LOADED, rollout=changed(ROLLOUT, on_stale="wait")),
    "bounded at the ship": scenario(fleet=LOADED, rollout=changed(ROLLOUT, enforce="ship")),
    "an engine dies twice": scenario(
        fleet=LOADED,
        faults=(
            Fault(at_seconds=60.0, what="engine_dies", for_seconds=20.0, engine=1),
            Fault(at_seconds=150.0, what="engine_dies", for_seconds=20.0, engine=1),
        ),
    ),
    "all engines die, at fixed speed": scenario(
        fleet=changed(FLEET, on_lost="restart"),
        faults=tuple(Fault(at_seconds=80.0 + engine, what="engine_dies", for_seconds=90.0, engine=engine) for engine in (0, 1)),
    ),
    "the trainer stalls and dies": scenario(
        fleet=LOADED,
        faults=(
            Fault(at_seconds=70.0, what="trainer_stalls", for_seconds=45.0),
            Fault(at_seconds=160.0, what="trainer_dies", for_seconds=30.0),
        ),
    ),
    "the orchestrator dies": scenario(
        fleet=LOADED,
        faults=(
            Fault(at_seconds=61.3, what="orchestrator_dies", for_seconds=25.0),
            Fault(at_seconds=170.7, what="orchestrator_dies", for_seconds=5.0),
        ),
    ),
}
PLAYED = {}


def played(name):
    if name not in PLAYED:
        PLAYED[name] = play(WORLDS[name], limit_seconds=1e5)
    return PLAYED[name]


@pytest.mark.parametrize("name", WORLDS)
def test_every_batch_is_trained_within_the_bound_and_no_group_or_token_vanishes(name):
    it = played(name)
    result, ledger = it.result, it.result.ledger
    assert ledger.trained == STEPS
    assert set(range(STEPS)) <= set(result.batches)
    assert 0 < result.max_staleness <= S
    admitted = {event.group for event in of(it, Admitted)}
    trained = [group for k in range(ledger.next_batch) for group in result.batches[k].groups]
    dropped = [event.group for event in of(it, GroupDropped)]
    ended = [*trained, *dropped, *ledger.running, *ledger.ready]
    assert len(ended) == len(set(ended))
    assert set(ended) == admitted

    delivered = sum(event.sampled_tokens for event in [*of(it, Finished), *of(it, EvalFinished)])
    delivered += sum(event.sampled_tokens for event in of(it, RolloutDropped) if not event.finished)
    undelivered = sum(tokens for _, tokens in it.undelivered)
    assert all(tokens > 0 for _, tokens in it.undelivered)
    assert result.sampled_tokens == delivered + undelivered + it.in_progress + it.eval_in_progress


@pytest.mark.parametrize("name", WORLDS)
def test_whoever_is_watched_is_watched_all_the_time(name):
    it = played(name)
    for intervals in [it.trainer, it.gate, *it.engines.values()]:
        assert (intervals[0].start, intervals[-1].end) == (0.0, it.end)
        assert all(one.end == other.start for one, other in pairwise(intervals))
        assert all(interval.start < interval.end for interval in intervals)
    assert {interval.state for interval in it.trainer} <= {"training", "waiting"}
    assert {interval.state for interval in it.gate} <= {"open", "closed"}
    assert all(interval.why for interval in [*it.trainer, *it.gate] if interval.state in {"waiting", "closed"})
    for name_of, intervals in it.engines.items():
        assert {interval.state for interval in intervals} <= {"generating", "idle", "paused", "lost"}
        assert {interval.who for interval in intervals} == {name_of}


@pytest.mark.parametrize("name", WORLDS)
def test_the_window_is_the_time_in_which_its_batches_were_trained(name):
    it = played(name)
    when = {event.k: event.time for event in of(it, BatchAcknowledged)}
    assert (it.warm_up, it.start, it.end) == (1, when[0], when[STEPS - 1])
    assert not of(it, Draining)
    assert it.in_flight_max <= WORLDS[name].rollout.max_concurrent
    assert 0 < it.in_flight_mean <= it.in_flight_max


def test_the_same_scenario_gives_the_same_history_and_another_seed_another():
    again = play(WORLDS["turns and tools"])
    assert again.result.events == played("turns and tools").result.events
    assert again.trainer == played("turns and tools").trainer
    assert again.engines == played("turns and tools").engines
    other = play(changed(WORLDS["turns and tools"], run=LengthSection(steps=STEPS, seed=1)))
    assert other.result.events != again.result.events


def test_the_end_of_the_play_casts_no_shadow():
    shorter = play(changed(WORLDS["under load"], run=LengthSection(steps=STEPS // 2)))
    events = [event for event in played("under load").result.events if event.time < shorter.end]
    assert events == [event for event in shorter.result.events if event.time < shorter.end]
    assert shorter.end < played("under load").end


def test_a_small_cache_puts_sequences_back_and_an_ample_one_never_does():
    assert played("a small cache").preemptions > 0
    assert played("fixed speed").preemptions == 0


def test_rollouts_in_flight_are_their_rate_times_their_stay():
    it = play(changed(WORLDS["under load"], run=LengthSection(steps=40, warm_up=4)))
    stays = [event.seconds for event in of(it, Finished) if it.start < event.time <= it.end]
    assert it.in_flight_mean == pytest.approx(sum(stays) / (it.end - it.start), rel=0.05)
    paused = sum(max(0.0, min(one.end, it.end) - max(one.start, it.start)) for one in it.engines["engine-0"] if one.state == "paused")
    unpaused = 1 - paused / (it.end - it.start)
    assert sum(it.sequences.values()) == pytest.approx(it.in_flight_mean * unpaused, rel=0.05)


def test_an_engine_that_is_full_writes_as_fast_as_its_formula_says():
    fleet = FleetSection(engines=1, tokens_per_second=20.0, half_speed_at=10.0)
    rollout = changed(ROLLOUT, max_concurrent=40, on_stale="train", enforce="ship", max_ready_groups=10_000)
    it = play(scenario(fleet=fleet, rollout=rollout, training=TrainingSection(), workload=changed(WORK, tokens=Lognormal(200.0, 0.3))))
    assert it.sampled / (it.end - it.start) == pytest.approx(40 * 20.0 / (1 + 40 / 10.0), rel=0.02)


def test_a_batch_takes_the_trainer_its_tokens_time():
    it = play(scenario(training=TrainingSection(seconds=4.0, tokens_per_second=1500.0)))
    took = [interval.end - interval.start for interval in it.trainer if interval.state == "training"]
    if len(took) < STEPS:  # two that follow at once are two stretches, or the log is wrong
        pytest.fail(f"{len(took)} stretches of {STEPS} batches")
    assert took[:STEPS] == pytest.approx([4.0 + it.result.batches[k].positions / 1500.0 for k in range(STEPS)])
    assert [row["tokens"] for row in it.result.rows["metrics"]][:STEPS] == [it.result.batches[k].positions for k in range(STEPS)]


def test_a_stall_holds_a_batch_up_and_a_death_has_it_begin_again():
    faults = (
        Fault(at_seconds=35.0, what="trainer_stalls", for_seconds=7.0),
        Fault(at_seconds=85.0, what="trainer_dies", for_seconds=5.0),
    )
    fleet = changed(FLEET, tokens_per_second=2000.0, sync_seconds=0.0)
    it = play(scenario(training=TrainingSection(seconds=10.0), fleet=fleet, faults=faults))
    start = next(interval.start for interval in it.trainer if interval.state == "training")
    trained = [start + 10.0 * (k + 1) for k in range(3)] + [start + 47.0, start + 57.0, start + 67.0, start + 77.0]
    assert [event.time for event in of(it, BatchAcknowledged)] == pytest.approx([*trained, *(100.0 + 10.0 * n for n in range(5))])
    away = [(interval.start, interval.end, interval.state, interval.why) for interval in it.trainer if interval.why in {"stalled", "lost"}]
    assert away == [(35.0, 42.0, "waiting", "stalled"), (85.0, 90.0, "waiting", "lost")]


def test_an_engine_that_died_is_lost_until_it_is_given_weights_again():
    it = played("an engine dies twice")
    lost = [(interval.start, interval.end) for interval in it.engines["engine-1"] if interval.state == "lost"]
    assert [start for start, _ in lost] == [60.0, 150.0]
    assert all(start + 20.0 <= end < start + 30.0 for start, end in lost)
    assert not any(interval.state == "lost" for interval in it.engines["engine-0"])
    assert sum(tokens for _, tokens in it.undelivered) > 0


def test_while_the_orchestrator_is_down_nobody_admits_and_the_run_goes_on_afterwards():
    it = played("the orchestrator dies")
    down = [(interval.start, interval.end) for interval in it.gate if interval.why == "the orchestrator is down"]
    assert [start for start, _ in down] == [61.3, 170.7]
    assert [end for _, end in down] == pytest.approx([86.3, 175.7])
    assert it.result.lives == 3
    assert not any(start < event.time < end for start, end in down for event in of(it, Admitted) + of(it, BatchFormed))


def test_a_mean_of_one_is_what_jitter_multiplies_by():
    rollout = changed(ROLLOUT, groups_per_batch=1, group_size=2)
    training, workload = TrainingSection(seconds=3.0, jitter=0.5), WorkloadSection(tokens=Fixed(20.0))
    it = play(scenario(training=training, workload=workload, rollout=rollout, run=LengthSection(steps=300)))
    took = [row["step_seconds"] for row in it.result.rows["metrics"]][:300]
    assert sum(took) / len(took) == pytest.approx(3.0, rel=0.1)
    assert max(took) > 1.5 * min(took)


def test_a_world_in_which_nothing_can_be_trained_ends():
    with pytest.raises(EmptyBatches):
        play(scenario(workload=changed(WORK, failures=(Failing(cause="environment_error", share=1.0, retried=False),))))


@pytest.mark.parametrize(("steps", "warm_up", "expected"), [(200, None, 20), (5, None, 0), (1, None, 0), (10, 3, 3), (10, 0, 0), (3, 3, 2)])
def test_a_tenth_is_warm_up_unless_it_is_said_otherwise(steps, warm_up, expected):
    assert warm_up_of(scenario(run=LengthSection(steps=steps, warm_up=warm_up))) == expected


def test_groups_that_a_filter_refuses_train_nothing_and_cost_what_they_wrote():
    summary = summarise(played("groups that a filter refuses"))
    assert summary.tokens.lost["filtered"] / summary.tokens.sampled == pytest.approx(0.4, abs=0.12)
