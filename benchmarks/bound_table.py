"""What the bound costs in tokens: the table of the design page on staleness, by the components that ship, on virtual time.

    python benchmarks/bound_table.py [--batches 40] [--max-lead 0] [--seed 0] [--rows "mask;wait"] [--columns "Pareto 2"] [--groups 8,16]

A world as published: 256 groups a batch, E[L] = T = 1 s, engines pause .02 s for a sync, trainer jitter 10 % (lognormal), max_concurrent
1.25 x what the trainer needs, max_staleness = steps_ahead = 4 (the last rows: 8), groups of one. `--groups` plays mask at lognormal 1 with
larger groups too, relative to what the trainer could take. Every run is `batches` + 20 seconds long in virtual time (wait, which forms
few batches: 5 times that); the first 20 are warm-up. `--max-lead` is 0 as published; what ships by default is 1. One JSON line per run:

  useful    contributing tokens of the batches trained after the warm-up, relative to the unbounded run of that column
  rate      batches trained after the warm-up, relative to it
  tokens    contributing tokens relative to what the trainer takes of such rollouts on average: `useful` without the noise of its reference
  waste     share of the tokens that engines wrote that no batch will ever train on (what still waits at the end is left out)
  stalest   the staleness of the stalest token that was trained on; `mean`: the mean staleness
  longest   how often the longest 1 % of rollouts are among the trained ones, over 1 %

Rows: unbounded (no gate, everything is trained), train (AReaL's admission; consumed oldest first here), ship (drop with enforce = "ship":
the nearest to prime-rl's sweep of finished groups), wait, drop, mask, mask 8.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from statistics import NormalDist
from typing import Any

import numpy as np

from headway.events import BatchAcknowledged, BatchFormed, Finished
from headway.settings import RolloutSection, RunSection
from headway.sim.distributions import Distribution, Fixed, Lognormal, Pareto, Uniform, mixture
from headway.sim.engine import EngineSettings
from headway.sim.run import SimResult, WorldSettings, simulate
from headway.sim.trainer import TrainerSettings
from headway.sim.worker import RolloutSettings
from headway.types import Prompt

B, TOKENS_PER_SECOND, WARM_UP = 256, 100.0, 20
NEVER = 10**6

ROWS: dict[str, dict[str, Any]] = {
    "unbounded": {"on_stale": "train", "max_staleness": NEVER},
    "train": {"on_stale": "train"},
    "ship": {"on_stale": "drop", "enforce": "ship"},
    "wait": {"on_stale": "wait"},
    "drop": {"on_stale": "drop"},
    "mask": {"on_stale": "mask"},
    "mask 8": {"on_stale": "mask", "max_staleness": 8},
    "mask 8, A 2": {"on_stale": "mask", "max_staleness": 8, "steps_ahead": 2},
}

COLUMNS: dict[str, tuple[Distribution, float]] = {  # and the seconds that 1 % of the rollouts take at least
    "uniform": (Uniform(0.2, 1.8), 1.784),
    "lognormal .5": (Lognormal(1.0, 0.5), math.exp(0.5 * NormalDist().inv_cdf(0.99) - 0.5**2 / 2)),
    "lognormal 1": (Lognormal(1.0, 1.0), math.exp(NormalDist().inv_cdf(0.99) - 1 / 2)),
    "Pareto 2": (Pareto(1.0, 2.0), 0.5 * 0.01**-0.5),
    "1 % at 20x": (mixture((0.99, Fixed(1 / 1.19)), (0.01, Fixed(20 / 1.19))), 20 / 1.19),
}
Figures = dict[str, float]
PUBLISHED_COLUMNS = ("lognormal .5", "lognormal 1", "Pareto 2", "1 % at 20x")


def drawn(_prompt: Prompt, _member: int, number: float) -> float:
    """Return a reward that no other rollout has."""
    return number


def play(row: str, column: str, group_size: int, batches: int, max_lead: int, seed: int) -> SimResult:
    """Play one run of `batches` + WARM_UP virtual seconds; what is in flight then finishes, and is counted as waiting."""
    world = WorldSettings(
        seed=seed,
        rollouts=RolloutSettings(seconds=COLUMNS[column][0], tokens_per_second=TOKENS_PER_SECOND, reward=drawn),
        engines=[EngineSettings(commit_seconds=0.02)],
        trainer=TrainerSettings(seconds=Lognormal(1.0, 0.1)),
        advantages=lambda rewards: rewards,
    )
    keys: dict[str, Any] = {"max_staleness": 4} | ROWS[row]
    section = RolloutSection(
        groups_per_batch=B,
        group_size=group_size,
        max_concurrent=5 * B * group_size // 4,
        timeout_seconds=0.0,
        max_lead=max_lead,
        **{"steps_ahead": keys["max_staleness"]} | keys,
    )
    run = RunSection(steps=NEVER, drain_timeout_seconds=1e6, max_uncovered_batches=0, max_empty_batches=NEVER)
    return simulate(world, section, run, drain_at=float(batches + WARM_UP))


def figures(result: SimResult, column: str, batches: int) -> Figures:
    """Return what the run came to, in tokens and batches a second."""
    end = batches + WARM_UP
    trained = {event.k: event.time for event in result.events if isinstance(event, BatchAcknowledged)}
    counted = [result.batches[k] for k, at in trained.items() if WARM_UP <= at < end]
    sampled = {event.group: 0 for event in result.events if isinstance(event, Finished)}
    longest = shipped = 0
    threshold = round(COLUMNS[column][1] * TOKENS_PER_SECOND)
    group_of = {group for batch in counted for group in batch.groups}
    for event in result.events:
        if isinstance(event, Finished):
            sampled[event.group] += event.sampled_tokens
            if event.group in group_of:
                shipped += 1
                longest += event.sampled_tokens >= threshold
    in_batches = {group for event in result.events if isinstance(event, BatchFormed) for group in event.groups}
    contributing = sum(sum(batch.tokens.values()) for batch in result.batches.values())
    waiting = sum(sampled[group] for group in result.ledger.ready)
    ages = np.zeros(1 + max(batch.max_seen for batch in result.batches.values()))
    for batch in counted:
        for staleness, tokens in batch.tokens.items():
            ages[staleness] += tokens
    if in_batches & result.ledger.ready.keys():
        raise RuntimeError("a group is in a batch and waits")
    return {
        "tokens": sum(sum(batch.tokens.values()) for batch in counted) / batches,
        "batches": len(counted) / batches,
        "waste": round(1 - contributing / (result.sampled_tokens - waiting), 4),
        "stalest": max(batch.max_seen for batch in result.batches.values()),
        "mean": round(float((ages * np.arange(len(ages))).sum() / ages.sum()), 2),
        "longest": round(longest / (0.01 * shipped), 2),
    }


def measure(row: str, column: str, group_size: int, batches: int, max_lead: int, seed: int, reference: Figures | None) -> Figures:
    """Play a run, print its line, and return its figures; the reference of an unbounded run is itself."""
    started = time.process_time()
    result = figures(play(row, column, group_size, batches, max_lead, seed), column, batches)
    reference = result if reference is None else reference
    line = {
        "benchmark": "bound_table",
        "row": row,
        "latency": column,
        "group_size": group_size,
        "max_lead": max_lead,
        "batches": batches,
        "seed": seed,
        "useful": round(result["tokens"] / reference["tokens"], 4),
        "rate": round(result["batches"] / reference["batches"], 4),
        "tokens": round(result["tokens"] / (B * group_size * TOKENS_PER_SECOND), 4),
        **{name: result[name] for name in ("waste", "stalest", "mean", "longest")},
        "cpu_seconds": round(time.process_time() - started, 1),
    }
    print(json.dumps(line), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--max-lead", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", default="train;ship;wait;drop;mask;mask 8", help="separated by ;")
    parser.add_argument("--columns", default=";".join(PUBLISHED_COLUMNS), help="separated by ;")
    parser.add_argument("--groups", default="", help="group sizes for which mask is played too, at lognormal 1")
    options = parser.parse_args()
    batches, max_lead, seed = options.batches, options.max_lead, options.seed
    for column in filter(None, options.columns.split(";")):
        unbounded = measure("unbounded", column, 1, batches, max_lead, seed, None)
        for row in filter(None, options.rows.split(";")):
            measure(row, column, 1, batches * (5 if row == "wait" else 1), max_lead, seed, unbounded)
    for group_size in map(int, filter(None, options.groups.split(","))):
        ideal = {"tokens": B * group_size * TOKENS_PER_SECOND, "batches": 1.0}
        measure("mask", "lognormal 1", group_size, batches, max_lead, seed, ideal)


if __name__ == "__main__":
    main()
