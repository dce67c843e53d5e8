"""Whole runs over fleets: rolling syncs, engines that join and leave under load, versions that are served rarely."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.events import Admitted, BatchAcknowledged, EngineState, Finished, Published, RolloutDropped
from headway.settings import EngineSection, MetricsSection, RolloutSection, RunSection, TrainerSection
from headway.sim.distributions import Uniform
from headway.sim.engine import EngineSettings
from headway.sim.journal import SimJournal
from headway.sim.run import WorldSettings, simulate
from headway.sim.worker import RolloutSettings
from headway.sim.world import Kill

STEPS = 30
ROLLING = EngineSection(sync_order="rolling")


class Keeping(SimJournal):
    """A journal that keeps every rollout that finished, for the test."""

    def __init__(self):
        super().__init__()
        self.finished = []

    async def append(self, entries):
        self.finished += [entry.rollout for entry in entries if entry.rollout is not None]
        return await super().append(entries)


def play(*engines, steps=STEPS, bound=2, on_stale="mask", rollouts=None, prompts=1000, epochs=0, checked=True, **more):
    journal = Keeping()
    rollouts = rollouts or RolloutSettings(seconds=Uniform(1.0, 9.0), turns=3)
    world = WorldSettings(rollouts=rollouts, engines=engines, prompts=prompts, epochs=epochs)
    rollout = RolloutSection(
        groups_per_batch=4, group_size=4, max_concurrent=64, max_staleness=bound, steps_ahead=bound, on_stale=on_stale, timeout_seconds=1e4
    )
    metrics = MetricsSection(interval_seconds=0.25)
    result = simulate(world, rollout, RunSection(steps=steps), metrics=metrics, journal=journal, limit_seconds=20_000, **more)
    ledger = result.ledger
    assert result.max_staleness <= bound
    assert (ledger.trained, ledger.version, ledger.rollouts_in_flight) == (len(result.batches), len(result.batches), 0)
    assert ledger.admitted == ledger.trained * 4 + len(ledger.ready) + sum(ledger.dropped.values())
    if checked:
        check_versions(result.events)
    return result, journal.finished


def of(result, kind):
    return [event for event in result.events if isinstance(event, kind)]


def check_versions(events):
    """What is published is what the slowest of the serving engines serves; no token is older than its group's birth."""
    served, births, version = {}, {}, -1
    for event in events:
        match event:
            case EngineState(engine=name, state="serving" | "leaving", label=label) if label:  # one may leave before it has served
                served[name] = int(label.rpartition("-")[2])
            case EngineState(engine=name, state="lost" | "left"):
                served.pop(name, None)
            case Published():
                assert version < event.version == min(served.values())
                version = event.version
            case Admitted():
                assert event.birth == version
                births[event.group] = event.birth
            case Finished():
                assert event.head >= births[event.group]
            case _:
                pass


def histories(events):
    """When each engine served what, as it was told: (time, version), by name."""
    told = {}
    for event in events:
        if isinstance(event, EngineState) and event.state in {"serving", "leaving"} and event.label:
            told.setdefault(event.engine, []).append((event.time, int(event.label.rpartition("-")[2])))
    return told


def served_at(history, time):
    return max((version for told, version in history if told <= time + 1e-9), default=0)


def mean_load(result, since=5.0):
    """Rollouts in flight, on the mean over the rows, by engine."""
    rows = [row["engine_load"] for row in result.rows["pipeline"] if row["time"] >= since]
    return {name: sum(row.get(name, 0) for row in rows) / len(rows) for name in {name for row in rows for name in row}}


@pytest.mark.parametrize("interleaving", [None, 1, 2])
def test_two_engines_with_different_load_times_under_rolling_sync(interleaving):
    slow, fast = EngineSettings(transfer_seconds=0.8), EngineSettings(transfer_seconds=0.2)
    result, finished = play(slow, fast, engine=ROLLING, interleaving=interleaving)
    told = histories(result.events)
    for rollout in finished:  # affinity: all turns of a rollout ran at one engine, so its stamps are that engine's history
        history = told[rollout.engine]
        assert rollout.head >= served_at(history, rollout.started)
        assert rollout.tail <= served_at(history, rollout.finished)
        assert {version for _, version in rollout.metadata["spans"]} <= {0, *(version for _, version in history)}
    assert not of(result, RolloutDropped)
    states = [list(row["engines"].values()) for row in result.rows["pipeline"]]
    assert max(sum(state.startswith("syncing") for state in row) for row in states) == 1
    slowest, busiest = sorted(mean_load(result).values())
    assert busiest <= 1.1 * slowest
    assert {rollout.engine for rollout in finished} == {"engine-0", "engine-1"}


def named(*spans, **more):
    return EngineSettings(transfer_seconds=0.5, named=spans, **more)


@pytest.mark.parametrize("order", ["rolling", "all_at_once"])
@pytest.mark.parametrize("interleaving", [None, 1])
def test_engines_join_and_leave_under_load_and_nothing_is_lost(order, interleaving):
    fleet = [EngineSettings(transfer_seconds=0.5), named((20.0, inf)), named((10.0, 40.0), (60.0, inf)), named((0.0, 30.2))]
    result, finished = play(*fleet, engine=EngineSection(sync_order=order), interleaving=interleaving)
    assert sum(result.ledger.dropped.values()) == 0
    assert not of(result, RolloutDropped)  # who was on an engine that left has ended there
    told = {}
    for event in of(result, EngineState):
        told.setdefault(event.engine, [])
        if told[event.engine][-1:] != [event.state]:
            told[event.engine].append(event.state)
    assert len(told) == 5
    assert sorted(told.values()) == sorted(
        [["serving"], ["serving"], ["serving"], ["serving", "leaving", "left"], ["serving", "leaving", "left"]]
    )
    assert {rollout.engine for rollout in finished} == {f"engine-{number}" for number in range(4)}
    left = {event.engine: event.time for event in of(result, EngineState) if event.state == "left"}
    leaving = {event.engine: event.time for event in reversed(of(result, EngineState)) if event.state == "leaving"}
    assert all(leaving[name] < left[name] <= leaving[name] + 12 for name in left)


def test_a_run_whose_engines_are_all_named_by_the_list_starts_with_the_first_and_outlives_an_empty_moment():
    result, _ = play(named((7.0, 30.0), (45.0, inf)), named((50.0, inf)))
    first = of(result, Published)[0]
    assert (first.version, first.time) == (0, 7.5)
    waits = [event for event in of(result, EngineState) if event.state == "left"]
    assert len(waits) == 1
    assert sum(result.ledger.dropped.values()) == 0


def test_an_engine_that_dies_as_it_leaves_gives_its_rollouts_to_others():
    result, _ = play(EngineSettings(transfer_seconds=0.5), named((0.0, 20.0), dies_at=21.0))
    states = [event.state for event in of(result, EngineState) if event.engine == "engine-1"]
    assert states[-3:] == ["leaving", "lost", "left"]
    assert sum(result.ledger.dropped.values()) == 0


@pytest.mark.parametrize("on_stale", ["mask", "wait", "drop"])
@pytest.mark.parametrize("order", ["rolling", "all_at_once"])
def test_every_third_version_is_served_at_the_tightest_bound_and_the_run_does_not_stand_still(on_stale, order):
    engines = [EngineSettings(transfer_seconds=0.5), EngineSettings(transfer_seconds=0.1)]
    more = {"engine": EngineSection(sync_order=order), "trainer": TrainerSection(publish_every=3)}
    result, _ = play(*engines, on_stale=on_stale, bound=2, **more)
    versions = [event.version for event in of(result, Published)]
    assert versions == list(range(0, STEPS + 1, 3))
    assert [event.k for event in of(result, BatchAcknowledged)] == list(range(STEPS))


def test_a_run_that_uses_its_prompts_up_serves_its_last_version_though_it_is_no_third():
    result, _ = play(EngineSettings(), prompts=28, epochs=1, trainer=TrainerSection(publish_every=3))
    assert [event.version for event in of(result, Published)] == [0, 3, 6, 7]


@pytest.mark.parametrize("at", [12.0, 23.4, 31.0])
def test_a_run_whose_process_is_killed_while_engines_come_and_go_is_taken_up(at):
    fleet = [named((0.0, 25.0), (40.0, inf)), named((10.0, inf)), named((15.0, 33.0))]
    result, _ = play(*fleet, engine=ROLLING, kills=[Kill(at=at)], checked=False)
    assert result.lives == 2
    assert sorted(result.batches) == list(range(STEPS))
    assert result.max_staleness <= 2


@settings(max_examples=12, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=4),
    loads=st.lists(st.sampled_from([0.0, 0.3, 2.0]), min_size=5, max_size=5),
    rolling=st.booleans(),
    every=st.integers(1, 3),
    interleaving=st.none() | st.integers(0, 3),
)
def test_whoever_comes_and_goes_the_run_ends_within_its_bound_and_loses_nothing(spans, loads, rolling, every, interleaving):
    guests = [
        EngineSettings(transfer_seconds=load, named=((begin, begin + long),)) for (begin, long), load in zip(spans, loads, strict=False)
    ]
    sections = {
        "engine": EngineSection(sync_order="rolling" if rolling else "all_at_once"),
        "trainer": TrainerSection(publish_every=every),
    }
    result, _ = play(EngineSettings(transfer_seconds=loads[-1]), *guests, steps=12, interleaving=interleaving, **sections)
    assert sorted(result.batches) == list(range(12))
    assert not of(result, RolloutDropped)
    assert sum(result.ledger.dropped.values()) == 0
