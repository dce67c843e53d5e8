"""Whole runs whose engines die: by policy their rollouts go on, with their turns and exact stamps, or start anew; the books close."""

import pytest

from headway.events import Published, RolloutDropped
from headway.rules.waste import waste
from headway.settings import EngineSection, RolloutSection, RunSection
from headway.sim.distributions import Uniform
from headway.sim.engine import EngineSettings
from headway.sim.run import WorldSettings, simulate
from headway.sim.worker import RolloutSettings

STEPS = 20


def play(on_lost, *, interleaving=None):
    engines = [EngineSettings(dies_at=at, back_at=at + 6.0) for at in (20.3, 33.1)]
    result = simulate(
        WorldSettings(rollouts=RolloutSettings(seconds=Uniform(1.0, 9.0), turns=3, tool_seconds=Uniform(0.0, 1.0)), engines=engines),
        RolloutSection(groups_per_batch=4, group_size=4, max_concurrent=64, max_staleness=2),
        RunSection(steps=STEPS),
        engine=EngineSection(on_lost=on_lost),
        interleaving=interleaving,
        limit_seconds=20_000,
    )
    assert sorted(result.batches) == list(range(STEPS))
    assert result.max_staleness <= 2
    fates = {row["batch"]: row["token_fates"] for row in result.rows["metrics"]}
    books = waste(result.events, fates)
    assert books.problems == []
    assert sum(books.rows.values()) == books.delivered <= result.sampled_tokens
    published = [event.version for event in result.events if isinstance(event, Published)]
    assert max(version for batch in result.batches.values() for version in batch.tokens) <= max(published)
    for k, batch in result.batches.items():
        assert max(batch.tokens) <= k  # no token is newer than the weights that the batch trains
    return [event for event in result.events if isinstance(event, RolloutDropped) and event.cause == "engine_error"], result


@pytest.mark.parametrize("interleaving", [None, 1, 2])
def test_rollouts_go_on_and_no_attempt_is_lost(interleaving):
    # (an engine that dies within a sync is not looked at until that has ended: a turn that fails meanwhile is its attempt's failure)
    lost, result = play("continue", interleaving=interleaving)
    assert lost == []
    assert sum(result.ledger.dropped.values()) == 0


@pytest.mark.parametrize("interleaving", [None, 1])
def test_rollouts_start_anew_by_policy(interleaving):
    lost, _ = play("restart", interleaving=interleaving)
    assert lost
    assert not any(event.final for event in lost)
    assert sum(event.sampled_tokens for event in lost) > 0  # turns that going on would have kept
