"""What the bound costs where it binds: 256 groups a batch, rollouts as long as a batch takes, lognormal with sigma 1.

The table over more latencies, modes and group sizes: `benchmarks/bound_table.py`, docs/design/bound-measured.md.
"""

from dataclasses import dataclass
from functools import cache

from bound_world import bounded_world

from headway.events import BatchAcknowledged
from headway.settings import RolloutSection, RunSection
from headway.sim.distributions import Lognormal
from headway.sim.run import simulate
from headway.sim.trainer import TrainerSettings

B, WARM_UP, END = 256, 20.0, 60.0  # seconds of virtual time, a batch each


@dataclass(frozen=True)
class Cost:
    useful: float  # contributing tokens a second
    rate: float  # batches a second
    mean: float  # staleness of contributing tokens
    stalest: int


@cache
def cost(on_stale, max_staleness, steps_ahead, max_lead):
    section = RolloutSection(
        groups_per_batch=B,
        group_size=1,
        max_concurrent=5 * B // 4,
        max_staleness=max_staleness,
        steps_ahead=steps_ahead,
        on_stale=on_stale,
        max_lead=max_lead,
        timeout_seconds=0.0,
    )
    world = bounded_world(Lognormal(1.0, 1.0), trainer=TrainerSettings(seconds=Lognormal(1.0, 0.1)))
    run = RunSection(steps=10**6, drain_timeout_seconds=1e6, max_uncovered_batches=0, max_empty_batches=10**6)
    result = simulate(world, section, run, drain_at=END)
    trained = [event.k for event in result.events if isinstance(event, BatchAcknowledged) and WARM_UP <= event.time < END]
    tokens = [entry for k in trained for entry in result.batches[k].tokens.items()]
    count = sum(number for _, number in tokens)
    seconds = END - WARM_UP
    return Cost(count / seconds, len(trained) / seconds, sum(age * number for age, number in tokens) / count, result.max_staleness)


def unbounded():
    return cost("train", 10**6, 10**6, 1)


def test_mask_keeps_what_an_unbounded_run_keeps_but_for_the_tail_and_the_trainer_stays_as_busy():
    bounded = cost("mask", 4, 4, 0)
    assert bounded.stalest == 4 < unbounded().stalest
    assert bounded.useful >= 0.88 * unbounded().useful
    assert bounded.rate >= 0.99 * unbounded().rate


def test_a_batch_that_waits_while_another_trains_was_formed_a_version_early():
    assert 0.83 * unbounded().useful <= cost("mask", 4, 4, 1).useful < cost("mask", 4, 4, 0).useful
    assert cost("mask", 4, 4, 1).rate >= 0.99 * unbounded().rate


def test_steps_ahead_sets_the_mean_staleness_and_costs_no_rate():
    near, far = cost("mask", 8, 2, 1), cost("mask", 8, 8, 1)
    assert near.mean < 3 < 6 < far.mean
    assert near.rate >= 0.99 * far.rate
    assert near.useful >= 0.98 * far.useful
