"""Whole runs whose engines die, hang and come back: every batch is trained once, within the bound, and nothing vanishes."""

from math import inf

import pytest

from headway.events import BatchFormed, EngineState, Published, RolloutDropped
from headway.settings import RolloutSection, RunSection
from headway.sim.distributions import Uniform
from headway.sim.engine import EngineSettings
from headway.sim.run import WorldSettings, simulate
from headway.sim.worker import RolloutSettings

STEPS = 40
FINE = EngineSettings(transfer_seconds=0.5)


def play(*engines, interleaving=None, rollouts=None):
    world = WorldSettings(rollouts=rollouts or RolloutSettings(seconds=Uniform(1.0, 9.0), turns=2), engines=engines)
    rollout = RolloutSection(groups_per_batch=4, group_size=4, max_concurrent=64, max_staleness=2)
    result = simulate(world, rollout, RunSection(steps=STEPS), interleaving=interleaving, limit_seconds=20_000)
    assert sorted(result.batches) == list(range(STEPS)) == [event.k for event in of(result, BatchFormed)]
    assert result.max_staleness <= 2
    ledger = result.ledger
    assert (ledger.trained, ledger.version, ledger.rollouts_in_flight, dict(ledger.running)) == (STEPS, STEPS, 0, {})
    assert ledger.admitted == STEPS * 4 + len(ledger.ready) + sum(ledger.dropped.values())
    return result


def of(result, kind):
    return [event for event in result.events if isinstance(event, kind)]


def ups_and_downs(result, engine):
    told = [event.state for event in of(result, EngineState) if event.engine == engine]
    return [state for before, state in zip([None, *told], told, strict=False) if state != before]


def dies(at, back=inf, **more):
    return EngineSettings(transfer_seconds=0.5, dies_at=at, back_at=back, **more)


@pytest.mark.parametrize("interleaving", [None, 1, 2])
def test_one_of_two_engines_dies_for_good_and_the_other_carries_the_run(interleaving):
    result = play(dies(40.0), FINE, interleaving=interleaving)
    assert ups_and_downs(result, "engine-0") == ["serving", "lost"]
    assert of(result, Published)[-1].engines == ("engine-1",)
    assert sum(result.ledger.dropped.values()) == 0  # who ran there was attempted anew, and nobody has failed


@pytest.mark.parametrize("interleaving", [None, 1, 2])
@pytest.mark.parametrize("back", [40.3, 45.0, 90.0])
def test_the_only_engine_dies_and_is_back_in_time(back, interleaving):
    result = play(dies(40.0, back), interleaving=interleaving)
    assert ups_and_downs(result, "engine-0") == ["serving", "lost", "serving"]
    assert {event.cause for event in of(result, RolloutDropped)} <= {"engine_error"}
    assert not any(event.final for event in of(result, RolloutDropped))


def test_engines_that_die_one_after_the_other_at_syncs_and_between_them():
    result = play(*(dies(30.0 + 7.3 * n, 45.0 + 9.1 * n) for n in range(4)))
    for n in range(4):
        assert ups_and_downs(result, f"engine-{n}") == ["serving", "lost", "serving"]


@pytest.mark.parametrize("stage", ["prepare", "transfer", "commit"])
def test_a_sync_that_fails_once_is_done_again(stage):
    result = play(EngineSettings(transfer_seconds=0.5, fails=frozenset({(stage, 3), (stage, 9)})))
    assert ups_and_downs(result, "engine-0") == ["serving", "lost", "serving", "lost", "serving"]
    assert [event.version for event in of(result, Published)] == sorted({event.version for event in of(result, Published)})


def test_the_pipeline_tells_what_became_of_the_engines():
    result = play(dies(40.0), FINE)
    rows = result.rows["pipeline"]
    assert all(row["engine_restarts"] == row["trainer_restarts"] == row["worker_restarts"] == 0 for row in rows)
    assert rows[1]["engines"]["engine-0"].startswith("serving sim-")
    assert rows[-1]["engines"] == {"engine-0": "lost", "engine-1": f"serving sim-{STEPS}"}
