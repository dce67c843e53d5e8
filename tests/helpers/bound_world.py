"""Worlds in which the staleness bound is tried: every shape of latency, every bounded mode, one helper that plays and checks."""

from typing import Any

from books import check_books

from headway.settings import RolloutSection, RunSection
from headway.sim.distributions import Fixed, Lognormal, Pareto, Uniform, mixture
from headway.sim.engine import EngineSettings
from headway.sim.run import WorldSettings, simulate
from headway.sim.trainer import TrainerSettings
from headway.sim.worker import RolloutSettings
from headway.types import Enforce, OnStale

LATENCIES = {
    "fixed": Fixed(1.0),
    "uniform": Uniform(0.2, 1.8),
    "lognormal .5": Lognormal(1.0, 0.5),
    "lognormal 1": Lognormal(1.0, 1.0),
    "lognormal 1.5": Lognormal(1.0, 1.5),
    "pareto 1.5": Pareto(1.0, 1.5),
    "pareto 2": Pareto(1.0, 2.0),
    "1 % at 20x": mixture((0.99, Fixed(1 / 1.19)), (0.01, Fixed(20 / 1.19))),
}
"""Seconds of a rollout, mean 1: as long as the trainer takes for a batch."""

MODES: dict[str, tuple[Enforce, OnStale]] = {
    "mask": ("admission", "mask"),
    "wait": ("admission", "wait"),
    "drop": ("admission", "drop"),
    "mask at ship": ("ship", "mask"),
    "drop at ship": ("ship", "drop"),
}
"""The bounded modes: (rollout.enforce, rollout.on_stale)."""


def drawn(prompt, member, number):
    """A reward that no other member has."""
    return number


def as_rewarded(rewards):
    """An advantage that a group of one has too."""
    return rewards


def four_fifths(rewards):
    """A filter that keeps 80 % of the groups."""
    return rewards[0] >= 0.2


def bounded_world(seconds=LATENCIES["lognormal 1"], *, faults=(), engines=None, trainer=None, rollouts=None, **world):
    """A trainer that takes 1 s a batch, give or take 10 %, and engines that pause .02 s for a sync."""
    return WorldSettings(
        rollouts=RolloutSettings(seconds=seconds, faults=faults, reward=drawn, **rollouts or {}),
        engines=[EngineSettings(commit_seconds=0.02)] if engines is None else engines,
        trainer=TrainerSettings(seconds=Uniform(0.9, 1.1)) if trainer is None else trainer,
        advantages=as_rewarded,
        **world,
    )


def bounded(mode, bound, **more):
    """[rollout] for a mode; A = S."""
    enforce, on_stale = MODES[mode]
    keys: dict[str, Any] = {"groups_per_batch": 16, "group_size": 1, "max_concurrent": 10_000, "steps_ahead": bound, "timeout_seconds": 1e6}
    return RolloutSection(enforce=enforce, on_stale=on_stale, max_staleness=bound, **keys | more)


def play(world, section, steps, **more):
    """Play a run without the guards that would end one with a heavy tail, and check its books."""
    run = RunSection(steps=steps, max_uncovered_batches=0, max_empty_batches=10_000, max_consecutive_failures=0, drain_timeout_seconds=1e6)
    result = simulate(world, section, run, **{"limit_seconds": 1e6, **more})
    check_books(result, section, steps)
    return result
