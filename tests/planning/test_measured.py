"""A scenario that is measured in a run: of simulated runs, whose world is known, it must be that world again, and predict the same figures.

The runs are written to real run directories and read back as `--from-run` reads them.
"""

from pathlib import Path

import msgspec
import pytest
from run_directories import run_info, write_journal, write_run

from headway.config.toml import resolved
from headway.errors import ConfigError, HeadwayError, StorageError
from headway.events import (
    Admitted,
    AnyEvent,
    BatchAcknowledged,
    BatchFormed,
    Finished,
    GroupDropped,
    Published,
    Ready,
    Resumed,
)
from headway.formats.run_directory import RunDirectory, save_run_info
from headway.planning.contradictions import scenario_contradictions
from headway.planning.measured import measured
from headway.planning.observed import acknowledged
from headway.reports.run_files import open_run
from headway.settings import Config, EngineSection, EnvironmentSection, EvalSection, PromptsSection, RolloutSection
from headway.sim.distributions import Lognormal
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
    drawn,
)

LONG = Lognormal(200.0, 0.7)
ROLLOUT = RolloutSection(groups_per_batch=8, group_size=4, max_concurrent=96, max_staleness=4, steps_ahead=2, timeout_seconds=0)
WORLDS = {
    "engines bind": Scenario(
        workload=WorkloadSection(tokens=LONG),
        fleet=FleetSection(tokens_per_second=40.0),
        training=TrainingSection(seconds=1.5, jitter=0.1),
        rollout=ROLLOUT,
    ),
    "engines slow down with load": Scenario(
        workload=WorkloadSection(tokens=LONG),
        fleet=FleetSection(tokens_per_second=80.0, half_speed_at=12.0, engines=2),
        training=TrainingSection(seconds=2.0, jitter=0.1),
        rollout=ROLLOUT,
    ),
    "the trainer binds, by tokens": Scenario(
        workload=WorkloadSection(tokens=LONG, prompt_tokens=100.0),
        fleet=FleetSection(tokens_per_second=100.0),
        training=TrainingSection(seconds=2.0, tokens_per_second=1500.0, jitter=0.02),
        rollout=ROLLOUT,
    ),
    "tools between turns": Scenario(
        workload=WorkloadSection(tokens=LONG, turns=4, tool_seconds=Lognormal(1.5, 0.8), observed_tokens=20),
        fleet=FleetSection(tokens_per_second=60.0, half_speed_at=64.0),
        training=TrainingSection(seconds=3.0, jitter=0.1),
        rollout=ROLLOUT,
    ),
    "weights take time": Scenario(
        workload=WorkloadSection(tokens=LONG),
        fleet=FleetSection(tokens_per_second=50.0, sync_seconds=1.5),
        training=TrainingSection(seconds=4.0, jitter=0.1),
        rollout=ROLLOUT,
    ),
    "attempts fail, groups are alike, a scorer takes time": Scenario(
        workload=WorkloadSection(
            tokens=LONG,
            score_seconds=2.0,
            zero_advantage_share=0.3,
            filtered_share=0.2,
            failures=(Failing(cause="environment_error", share=0.1), Failing(cause="bad_reward", share=0.04, retried=False)),
        ),
        fleet=FleetSection(tokens_per_second=50.0),
        training=TrainingSection(seconds=3.0, jitter=0.1),
        rollout=msgspec.structs.replace(ROLLOUT, dynamic_sampling=True),
    ),
    "evaluations take their part": Scenario(
        workload=WorkloadSection(tokens=LONG),
        fleet=FleetSection(tokens_per_second=50.0, half_speed_at=100.0),
        training=TrainingSection(seconds=3.0, jitter=0.1),
        rollout=ROLLOUT,
        eval=EvaluationSection(every=10, prompts=16, n=2),
    ),
}


def played(scenario, *, steps=70, seed=0):
    return play(msgspec.structs.replace(scenario, run=LengthSection(steps=steps, warm_up=10, seed=seed)))


def as_a_run(path: Path, played, **sections) -> Path:
    """Write a play as the run directory that it would have left, under a config that says of it what a real one would."""
    scenario = played.scenario
    write_run(path, played.result, scenario.rollout)
    fleet, score = scenario.fleet, "world:score" if drawn(scenario.workload.score_seconds).mean else ""
    config = {
        "rollout": scenario.rollout,
        "prompts": PromptsSection(source="world:prompts"),
        "environment": EnvironmentSection(entry="world:attempt", score=score),
        "engine": EngineSection(launch="none", urls=("http://engine",) * fleet.engines, weight_sync=fleet.weight_sync),
        **sections,
    }
    if scenario.eval is not None:
        config["eval"] = EvalSection(every=scenario.eval.every, n=scenario.eval.n, prompts="world:held_out")
    (path / "config.toml").write_text(resolved(Config(**config)))
    return path


@pytest.fixture(scope="module", params=WORLDS, ids=lambda name: name.replace(" ", "_"))
def round_trip(request, tmp_path_factory):
    """A world, a play of it, and what is measured in that."""
    play = played(WORLDS[request.param])
    path = as_a_run(tmp_path_factory.mktemp("run") / "run", play)
    return WORLDS[request.param], play, measured(open_run(path))


def test_what_is_measured_predicts_what_was_the_case(round_trip):
    _, before, found = round_trip
    was, will = summarise(before), summarise(played(found.scenario, seed=1))
    assert will.batches_per_hour == pytest.approx(was.batches_per_hour, rel=0.05)
    assert will.staleness.mean == pytest.approx(was.staleness.mean, abs=0.15)
    assert abs(will.staleness.max - was.staleness.max) <= 1
    assert will.latency_mean == pytest.approx(was.latency_mean, rel=0.1)


def test_the_world_is_found_again(round_trip):
    world, before, found = round_trip
    scenario = found.scenario
    assert drawn(scenario.workload.tokens).mean == pytest.approx(drawn(world.workload.tokens).mean, rel=0.05)
    assert batch_seconds(scenario) == pytest.approx(batch_seconds(world), rel=0.1)
    assert bool(scenario.training.tokens_per_second) == bool(world.training.tokens_per_second)
    assert scenario.fleet.engines == world.fleet.engines
    assert drawn(scenario.fleet.sync_seconds).mean == pytest.approx(drawn(world.fleet.sync_seconds).mean, abs=0.01)
    assert drawn(scenario.workload.score_seconds).mean == pytest.approx(drawn(world.workload.score_seconds).mean, abs=0.01)
    assert scenario.workload.turns == world.workload.turns
    assert scenario.workload.zero_advantage_share == pytest.approx(world.workload.zero_advantage_share, abs=0.08)
    assert scenario.workload.filtered_share == pytest.approx(world.workload.filtered_share, abs=0.08)
    assert scenario.rollout == world.rollout
    assert scenario_contradictions(scenario) == []
    for failing in world.workload.failures:
        [same] = [one for one in scenario.workload.failures if one.cause == failing.cause]
        assert (same.share, same.retried) == (pytest.approx(failing.share, abs=0.02), failing.retried)
    assert scenario.eval == world.eval
    decoding = max(1.0, sum(before.sequences.values()) / len(before.sequences))
    assert speed(scenario, decoding) == pytest.approx(speed(world, decoding), rel=0.15)


def batch_seconds(scenario):
    training = scenario.training
    return training.seconds + (32 * 300 / training.tokens_per_second if training.tokens_per_second else 0)


def speed(scenario, decoding):
    fleet = scenario.fleet
    return fleet.tokens_per_second / (1 + (decoding / fleet.half_speed_at if fleet.half_speed_at else 0))


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A play of few batches, and its run directory."""
    play = played(WORLDS["engines bind"], steps=30)
    return play, as_a_run(tmp_path_factory.mktemp("short") / "run", play)


def test_what_cannot_be_told_is_listed_by_its_key(short):
    _, path = short
    notes = measured(open_run(path)).notes
    for key in ("fleet.prefill_tokens_per_second", "fleet.kv_tokens", "fleet.max_sequences", "training.tokens_per_second"):
        [line] = [note for note in notes if note.startswith(f"{key}:")]
        assert "\n" not in line


def test_a_part_of_a_run_is_measured_where_that_is_asked_for(short):
    play, path = short
    times = acknowledged(play.result.events)
    whole, part = measured(open_run(path)), measured(open_run(path), since=times[9], until=times[19])
    assert (part.since, part.until, part.batches) == (times[9], times[19], 11)
    assert whole.batches == len(times) - 5  # steps_ahead = 2, and three more, are left out of themselves
    assert measured(open_run(path), until=times[19]).until == times[19]


def test_an_engine_that_is_dead_as_the_run_begins_changes_nothing_of_what_is_measured(tmp_path):
    world = WORLDS["engines slow down with load"]
    late = msgspec.structs.replace(world, faults=(Fault(at_seconds=0, what="engine_dies", for_seconds=600, engine=1),))
    sound, dead = (measured(open_run(as_a_run(tmp_path / name, played(one)))) for name, one in (("sound", world), ("dead", late)))
    assert dead.since > 600
    assert (dead.since - 600, dead.until - 600) == (pytest.approx(sound.since, rel=0.1), pytest.approx(sound.until, rel=0.1))
    assert dead.scenario.fleet.engines == sound.scenario.fleet.engines == 2
    assert speed(dead.scenario, 12) == pytest.approx(speed(sound.scenario, 12), rel=0.1)


def with_events(path: Path, events: list[AnyEvent]) -> Path:
    """Write a run directory with these events and no more."""
    run = RunDirectory.create(path)
    save_run_info(run, run_info())
    config = Config(prompts=PromptsSection(source="w:p"), environment=EnvironmentSection(entry="w:a"), rollout=ROLLOUT)
    run.config.write_text(resolved(config))
    write_journal(run.state, events)
    run.close()
    return path


def test_a_run_with_too_little_in_it_is_refused_in_one_line(short, tmp_path):
    play, path = short
    events = list(play.result.events)
    third = next(index for index, event in enumerate(events) if isinstance(event, BatchAcknowledged) and event.k == 3)
    cases: list[tuple[Path, str]] = [
        (with_events(tmp_path / "empty", []), "holds no batch that was trained"),
        (with_events(tmp_path / "begun", events[:40]), "holds no batch that was trained"),
        (with_events(tmp_path / "short", events[: third + 1]), "measure a longer run"),
    ]
    for directory, words in cases:
        with pytest.raises(ConfigError, match=words) as refused:
            measured(open_run(directory))
        assert "\n" not in str(refused.value)
        assert str(directory) in str(refused.value)
    with pytest.raises(ConfigError, match="no batch was trained in the time"):
        measured(open_run(path), until=-1.0)
    with pytest.raises(ConfigError, match="at least 5"):
        measured(open_run(path), since=acknowledged(events)[-2])


def test_a_run_that_is_damaged_is_refused_in_one_line(short, tmp_path):
    play, _ = short
    path = as_a_run(tmp_path / "run", play)
    (path / "state" / "events.sqlite").unlink()
    with pytest.raises(StorageError, match="no such file"):
        measured(open_run(path))
    path = as_a_run(tmp_path / "other", play)
    (path / "metrics.jsonl").write_text('{"batch": 1, "tokens": "many"}\n')
    with pytest.raises(HeadwayError, match=r"metrics\.jsonl.*is damaged"):
        measured(open_run(path))


def by_hand(first: int, batches: int, start: float):
    """Yield a history of batches of four groups of two: rollouts take 2 s, a scorer none, the trainer 1 s, the engines nothing."""
    for k in range(first, first + batches):
        begin = start + 3.0 * (k - first)
        groups = range(4 * k, 4 * k + 4)
        for group in groups:
            yield Admitted(begin, group, f"prompt-{group}", 0, 2, k)
        for group in groups:
            for member in range(2):
                yield Finished(begin + 2, group, member, 0, float(member), 30, 20 + 10 * member, k, k, turns=1, seconds=2.0)
            yield Ready(begin + 2, group, zero_advantage=False)
        yield BatchFormed(begin + 2, k, tuple(groups), 0.5)
        yield BatchAcknowledged(begin + 3, k)
        yield Published(begin + 3, k + 1, ("engine-0",))


def test_the_time_in_which_no_process_ran_is_nobodys(tmp_path):
    day = 86_400.0
    lost = [Admitted(60.5, 80, "prompt-80", 0, 2, 20), Finished(61.0, 80, 0, 0, 1.0, 30, 20, 20, 20, turns=1, seconds=0.5)]
    again = [Resumed(day, 20, 20, "sim"), GroupDropped(day, 80, "interrupted", "", 0, requeued=True)]
    events = [*by_hand(0, 20, 0.0), *lost, *again]
    later = [msgspec.structs.replace(event, **shifted(event)) for event in by_hand(20, 20, day)]
    found = measured(open_run(with_events(tmp_path / "run", [*events, *later])))
    assert found.scenario.training.seconds == pytest.approx(1.0)
    assert [note for note in found.notes if "taken up again 1 times" in note]
    assert found.batches == 40 - 5
    assert found.scenario.workload.tokens is not None
    lives = drawn(found.scenario.workload.tokens).mean / found.scenario.fleet.tokens_per_second
    assert lives + drawn(found.scenario.workload.tool_seconds).mean == pytest.approx(2.0, rel=0.05)


def shifted(event) -> dict[str, object]:
    """Return numbers of groups one higher: a group was admitted before, and lost."""
    if hasattr(event, "groups"):
        return {"groups": tuple(group + 1 for group in event.groups)}
    return {"group": event.group + 1} if hasattr(event, "group") else {}
