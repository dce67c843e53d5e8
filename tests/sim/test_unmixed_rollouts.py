"""engine.weight_sync = "wait": no rollout has tokens of two versions, whatever happens to its engines; and the run never stands still."""

from math import inf

import pytest

from headway.events import EngineState, Published
from headway.settings import EngineSection, EvalSection, MetricsSection, RolloutSection, RunSection
from headway.sim.distributions import Uniform
from headway.sim.engine import EngineSettings
from headway.sim.journal import SimJournal
from headway.sim.run import WorldSettings, simulate
from headway.sim.worker import Fault, RolloutSettings

STEPS = 20
ROLLOUTS = RolloutSettings(seconds=Uniform(1.0, 9.0), turns=4, tool_seconds=Uniform(0.0, 2.0))
LOADS = EngineSettings(transfer_seconds=0.5)


class Keeping(SimJournal):
    """A journal that keeps every rollout that finished, for the test."""

    def __init__(self):
        super().__init__()
        self.finished = []

    async def append(self, entries):
        self.finished += [entry.rollout for entry in entries if entry.rollout is not None]
        return await super().append(entries)


def play(*engines, sync="wait", order="all_at_once", seed=0, on_stale="mask", bound=2, rollouts=ROLLOUTS, timeout=0.0, **more):
    journal = Keeping()
    result = simulate(
        WorldSettings(rollouts=rollouts, engines=engines, seed=seed, eval_prompts=6),
        RolloutSection(
            groups_per_batch=4, group_size=4, max_concurrent=64, max_staleness=bound, on_stale=on_stale, timeout_seconds=timeout
        ),
        RunSection(steps=STEPS),
        engine=EngineSection(weight_sync=sync, sync_order=order),
        metrics=MetricsSection(interval_seconds=0.25),
        journal=journal,
        interleaving=seed or None,
        limit_seconds=5_000,
        **more,
    )
    assert sorted(result.batches) == list(range(STEPS))
    assert result.max_staleness <= bound
    assert result.ledger.version == STEPS
    return result, journal.finished


def straddling(finished):
    return [rollout for rollout in finished if rollout.head != rollout.tail]


def doing(result):
    return {state.split()[0] for row in result.rows["pipeline"] for state in row["engines"].values()}


@pytest.mark.parametrize("order", ["rolling", "all_at_once"])
@pytest.mark.parametrize("on_stale", ["mask", "wait", "drop"])
@pytest.mark.parametrize("seed", range(8))
def test_no_rollout_has_tokens_of_two_versions(order, on_stale, seed):
    result, finished = play(*[LOADS] * (1 + seed % 3), order=order, seed=seed, on_stale=on_stale)
    assert straddling(finished) == []
    assert "draining" in doing(result)
    assert "draining" in {event.state for event in result.events if isinstance(event, EngineState)}
    assert len({rollout.head for rollout in finished}) > STEPS / 3


@pytest.mark.parametrize("sync", ["in_flight", "abort_resume"])
def test_the_other_modes_drain_nothing_and_rollouts_go_on_over_versions(sync):
    result, finished = play(LOADS, LOADS, sync=sync)
    assert straddling(finished)
    assert "draining" not in doing(result)


@pytest.mark.parametrize("order", ["rolling", "all_at_once"])
@pytest.mark.parametrize("seed", range(8))
def test_engines_that_die_come_back_join_and_leave_mix_nothing(order, seed):
    engines = [
        EngineSettings(transfer_seconds=0.5, dies_at=11.0 + seed * 1.3, back_at=15.0 + seed * 1.3),
        EngineSettings(transfer_seconds=1.5, dies_at=12.5 + seed, back_at=13.0 + seed),
        EngineSettings(transfer_seconds=0.5, named=((5.0, 20.0 + seed), (24.0, 40.0), (41.0, inf))),
        EngineSettings(named=((0.0, 18.0),), dies_at=18.2),
    ]
    _, finished = play(*engines, order=order, seed=seed)
    assert straddling(finished) == []


@pytest.mark.parametrize("seed", range(4))
def test_the_only_engine_dies_while_it_drains(seed):
    result, finished = play(EngineSettings(transfer_seconds=0.5, dies_at=10.0 + seed * 1.7, back_at=11.0 + seed * 1.7), seed=seed)
    assert straddling(finished) == []
    assert "lost" in doing(result)


@pytest.mark.parametrize("order", ["rolling", "all_at_once"])
@pytest.mark.parametrize("hold", [0.0, 60.0])
def test_evaluations_get_their_places_too_and_hold_nothing_up(order, hold):
    result, finished = play(LOADS, LOADS, order=order, evaluation=EvalSection(every=3, prompts="eval.jsonl", hold_seconds=hold))
    assert straddling(finished) == []
    assert len(result.rows["eval"]) >= 4


def test_a_rollout_that_hangs_holds_a_sync_up_until_its_deadline_and_others_do_not_pay_for_it():
    def seconds(prompt, member):
        return Uniform(1e6, 2e6) if prompt.fields["number"] % 10 == member == 0 else Uniform(1.0, 3.0)

    hangs = RolloutSettings(seconds=seconds, turns=2)
    result, finished = play(LOADS, rollouts=hangs, timeout=30.0)
    assert straddling(finished) == []
    assert 0 < result.ledger.lost["timeout"] == sum(1 for _ in _hung(result))


def _hung(result):
    return (event for event in result.events if getattr(event, "cause", "") == "timeout" and getattr(event, "member", -1) == 0)


@pytest.mark.parametrize("seed", range(3))
def test_attempts_that_fail_give_their_places_back(seed):
    rollouts = RolloutSettings(seconds=Uniform(1.0, 9.0), turns=3, faults=(Fault("environment_error", 0.1),))
    _, finished = play(LOADS, LOADS, rollouts=rollouts, seed=seed)
    assert straddling(finished) == []


def test_versions_that_come_while_engines_drain_are_overtaken():
    slow = RolloutSettings(seconds=Uniform(10.0, 30.0), turns=3)
    result, finished = play(LOADS, rollouts=slow, bound=4)
    assert straddling(finished) == []
    versions = [event.version for event in result.events if isinstance(event, Published)]
    assert versions == sorted(set(versions))
    assert versions[-1] == STEPS
