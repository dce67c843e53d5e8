"""What the bound costs in tokens, by the cohort stepper: the table of the design page on staleness, beside what was published with it.

    python benchmarks/staleness_table.py [--batches 200] [--seeds 5] [--groups 1,8,16]

The world as published: 256 groups a batch, E[L] = T = 1 s, engines pause .02 s for a sync, trainer jitter 10 % (lognormal), max_concurrent
1.25 x what the trainer needs, max_staleness = steps_ahead = 4 (last row: 8), max_lead 0; 20 batches of warm-up. Rows are headway's modes
and two references that only the simulator has: `completion order` (AReaL: batches in order of completion, all is trained on) and
`gate + sweep` (prime-rl: what is too old is thrown away before a batch is formed). One JSON line per cell and group size, means over seeds:

  useful     tokens trained on, relative to what the trainer takes of such rollouts
  waste      share of the sampled tokens that never train
  stalest    the stalest token that was trained on, at most over the seeds
  longest    trained share of the tokens of the longest tenth of rollouts
  deviation  from the published figures (of groups of one), where there are any

`stalest` of completion order is a matter of how long the longest rollout of the draw is.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import fmean

from headway.settings import RolloutSection
from headway.sim.cohort_scope import Policy
from headway.sim.cohorts import step
from headway.sim.distributions import Fixed, Given, Lognormal, Pareto, Uniform, mixture
from headway.sim.scenario import FleetSection, LengthSection, Scenario, TrainingSection, WorkloadSection
from headway.sim.summary import Summary
from headway.types import OnStale

B, TOKENS_PER_SECOND, WARM_UP = 256, 100.0, 20
COLUMNS: dict[str, Given] = {
    "uniform": Uniform(0.2, 1.8),
    "lognormal .5": Lognormal(1.0, 0.5),
    "lognormal 1": Lognormal(1.0, 1.0),
    "Pareto 2": Pareto(1.0, 2.0),
    "1 % at 20x": mixture((0.99, Fixed(1 / 1.19)), (0.01, Fixed(20 / 1.19))),
}
ROWS: dict[str, tuple[Policy, OnStale, int]] = {
    "completion order": ("completion_order", "train", 4),
    "gate + sweep": ("gate_and_sweep", "mask", 4),
    "wait": ("headway", "wait", 4),
    "drop": ("headway", "drop", 4),
    "mask": ("headway", "mask", 4),
    "mask, S = 8": ("headway", "mask", 8),
}
PUBLISHED: dict[str, dict[str, tuple[float, float, int]]] = {  # useful, waste, stalest
    "completion order": {"lognormal .5": (0.995, 0, 8), "lognormal 1": (0.99, 0, 51), "Pareto 2": (0.99, 0, 73), "1 % at 20x": (1, 0, 20)},
    "gate + sweep": {
        "lognormal .5": (0.99, 0.01, 4),
        "lognormal 1": (0.82, 0.15, 4),
        "Pareto 2": (0.89, 0.08, 4),
        "1 % at 20x": (0.84, 0.06, 4),
    },
    "wait": {"lognormal .5": (0.85, 0, 4), "lognormal 1": (0.28, 0, 4), "Pareto 2": (0.19, 0, 4), "1 % at 20x": (0.27, 0, 4)},
    "drop": {"lognormal .5": (0.99, 0.01, 4), "lognormal 1": (0.82, 0.13, 4), "Pareto 2": (0.89, 0.07, 4), "1 % at 20x": (0.84, 0.05, 4)},
    "mask": {"lognormal .5": (0.99, 0.002, 4), "lognormal 1": (0.90, 0.09, 4), "Pareto 2": (0.93, 0.06, 4), "1 % at 20x": (0.87, 0.14, 4)},
    "mask, S = 8": {
        "lognormal .5": (0.99, 0, 8),
        "lognormal 1": (0.97, 0.02, 8),
        "Pareto 2": (0.96, 0.03, 8),
        "1 % at 20x": (0.91, 0.10, 8),
    },
}


def scenario(row: str, column: str, group_size: int, batches: int, seed: int) -> Scenario:
    """The world of a cell."""
    _, mode, bound = ROWS[row]
    return Scenario(
        workload=WorkloadSection(seconds=COLUMNS[column]),
        training=TrainingSection(seconds=1.0, jitter=0.1),
        fleet=FleetSection(tokens_per_second=TOKENS_PER_SECOND, sync_seconds=0.02),
        rollout=RolloutSection(
            groups_per_batch=B,
            group_size=group_size,
            max_concurrent=5 * B * group_size // 4,
            max_staleness=bound,
            steps_ahead=bound,
            on_stale=mode,
            max_lead=0,
            timeout_seconds=0.0,
        ),
        run=LengthSection(steps=batches + WARM_UP, warm_up=WARM_UP, seed=seed),
    )


def figures(summary: Summary, group_size: int) -> dict[str, float]:
    """The figures of a cell."""
    tokens = summary.tokens
    return {
        "useful": summary.trained_tokens_per_second / (B * group_size * TOKENS_PER_SECOND),
        "waste": (tokens.masked + sum(tokens.lost.values())) / tokens.sampled,
        "rate": summary.batches_per_hour / 3600,
        "mean": summary.staleness.mean,
        "longest": summary.length_bias.trained_share[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--groups", default="1,8,16", help="group sizes")
    options = parser.parse_args()
    for group_size in map(int, options.groups.split(",")):
        for row, (policy, _, _) in ROWS.items():
            for column in COLUMNS:
                started = time.process_time()
                summaries = [step(scenario(row, column, group_size, options.batches, seed), policy=policy) for seed in range(options.seeds)]
                seconds = time.process_time() - started
                cells = [figures(summary, group_size) for summary in summaries]
                means = {name: round(fmean(cell[name] for cell in cells), 4) for name in cells[0]}
                stalest = max(summary.staleness.max for summary in summaries)
                line: dict[str, object] = {"benchmark": "staleness_table", "row": row, "latency": column, "group_size": group_size}
                line |= means | {"stalest": stalest}
                if group_size == 1 and column in PUBLISHED[row]:
                    useful, waste, oldest = PUBLISHED[row][column]
                    line["deviation"] = {
                        "useful": round(means["useful"] - useful, 3),
                        "waste": round(means["waste"] - waste, 3),
                        "stalest": stalest - oldest,
                    }
                print(json.dumps(line | {"cpu_seconds": round(seconds, 2)}), flush=True)


if __name__ == "__main__":
    main()
