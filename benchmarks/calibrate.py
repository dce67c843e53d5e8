"""Prediction against reality: real runs, and what a simulation of a scenario measured in their first half says of their second.

Each run is played to its end by `headway run`. Its journal up to the middle batch becomes a scenario (as with `--from-run`), that is
simulated, and what comes out is held against the batches after the middle. Two more figures tell where a miss comes from: `first_half`, how
it was when it was measured (a policy that learns drifts, and so does a machine that others use), and `refitted`: a simulation of what was
measured in the second half itself. Prints a JSON line per run; on stderr, a table.

    python benchmarks/calibrate.py                                  # `make calibrate`: half an hour on two cores
    python benchmarks/calibrate.py --arms quickstart --batches 80   # a short one
    python benchmarks/calibrate.py --of runs/mine                   # of a run that there is already
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from math import ceil
from pathlib import Path
from typing import Any

from headway.planning.measured import measured
from headway.planning.observed import acknowledged
from headway.reports.run_files import RunFiles, open_run
from headway.settings import steps_ahead
from headway.sim.figures import summarise
from headway.sim.play import play
from headway.sim.scenario import LengthSection, Scenario

ROOT = Path(__file__).resolve().parent.parent
SLOWLY = {"trainer.learning_rate": 2.5e-4}  # a tenth: at the example's own all groups score alike before 300 batches, and the run ends
ARMS = {
    "quickstart": (ROOT / "examples" / "guess" / "run.toml", {"run.finish_when.over_batches": 1000, **SLOWLY}),
    "heavy": (ROOT / "benchmarks" / "calibrate_arms" / "run.toml", SLOWLY),
}
RATE_WITHIN = 0.15  # of the rate that was seen
STALENESS_WITHIN = 0.5  # versions


def really_run(name: str, directory: Path, batches: int, seed: int) -> RunFiles:
    """Play a real run of so many batches."""
    config, given = ARMS[name]
    overrides = {"run.directory": str(directory), "run.steps": batches, "run.seed": seed, "metrics.progress": "none", **given}
    command = [sys.executable, "-m", "headway", "run", str(config)]
    command += [part for key, value in overrides.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return open_run(directory)


def seen(run: RunFiles, first: int, last: int) -> dict[str, float]:
    """Return the figures of batches first .. last - 1, as they really were."""
    times = acknowledged(run.events())
    rows = run.batches()[first:last]
    tokens = sum(row["contributing_tokens"] for row in rows)
    return {
        "batches_per_hour": round(3600 * (last - first) / (times[last - 1] - times[first - 1]), 1),
        "staleness_mean": round(sum(row["token_staleness_mean"] * row["contributing_tokens"] for row in rows) / tokens, 3),
        "staleness_max": max(row["token_staleness_max"] for row in rows),
    }


def simulated(scenario: Scenario, steps: int) -> dict[str, float]:
    """Return the same figures of a simulation."""
    summary = summarise(play(Scenario(**{**_fields(scenario), "run": LengthSection(steps=steps)})))
    return {
        "batches_per_hour": round(summary.batches_per_hour, 1),
        "staleness_mean": round(summary.staleness.mean, 3),
        "staleness_max": summary.staleness.max,
    }


def _fields(scenario: Scenario) -> dict[str, Any]:
    return {name: getattr(scenario, name) for name in scenario.__struct_fields__}


def calibrate(name: str, run: RunFiles, steps: int) -> dict[str, Any]:
    """Return prediction and reality of one run."""
    times = acknowledged(run.events())
    middle = len(times) // 2
    last = len(times) - ceil(steps_ahead(run.rollout)) - 1  # for the last ones nothing new started beside them
    found = measured(run, until=times[middle - 1])
    started = time.perf_counter()
    predicted = simulated(found.scenario, steps)
    seconds = time.perf_counter() - started
    real = seen(run, middle, last)
    misses = {
        "rate": round(predicted["batches_per_hour"] / real["batches_per_hour"] - 1, 3),
        "staleness_mean": round(predicted["staleness_mean"] - real["staleness_mean"], 3),
        "staleness_max": predicted["staleness_max"] - real["staleness_max"],
    }
    return {
        "benchmark": f"calibrate/{name}",
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "batches": len(times),
        "predicted": predicted,
        "seen": real,
        "misses": misses,
        "within": abs(misses["rate"]) <= RATE_WITHIN
        and all(abs(misses[key]) <= STALENESS_WITHIN for key in ("staleness_mean", "staleness_max")),
        "of_its_own_half": round(predicted["batches_per_hour"] / seen(run, middle - found.batches, middle)["batches_per_hour"] - 1, 3),
        "first_half": seen(run, middle - found.batches, middle),
        "refitted": simulated(measured(run, since=times[middle - 1], until=times[last - 1]).scenario, steps),
        "simulated_seconds": round(seconds, 1),
        "notes": found.notes,
    }


def table(results: list[dict[str, Any]]) -> str:
    """Return the results for people."""
    columns = ["run", "batches/hour", "predicted", "miss", "mean staleness", "predicted", "max", "predicted", "first half", "refitted"]
    lines = [columns, ["---"] * len(columns)]
    for result in results:
        real, predicted = result["seen"], result["predicted"]
        lines.append(
            [
                str(result["benchmark"]).partition("/")[2],
                f"{real['batches_per_hour']:.0f}",
                f"{predicted['batches_per_hour']:.0f}",
                f"{100 * result['misses']['rate']:+.1f} %",
                f"{real['staleness_mean']:.2f}",
                f"{predicted['staleness_mean']:.2f}",
                f"{real['staleness_max']}",
                f"{predicted['staleness_max']}",
                f"{result['first_half']['batches_per_hour']:.0f}",
                f"{result['refitted']['batches_per_hour']:.0f}",
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--batches", type=int, default=300, help="of each real run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=300, help="of each simulation")
    parser.add_argument("--of", type=Path, nargs="+", default=[], help="run directories; nothing is run then")
    options = parser.parse_args()
    results = []
    for path in options.of:
        results.append(calibrate(path.name, open_run(path), options.steps))
        print(json.dumps(results[-1]), flush=True)
    for name in options.arms if not options.of else []:
        for seed in options.seeds:
            with tempfile.TemporaryDirectory() as directory:
                run = really_run(name, Path(directory) / "run", options.batches, seed)
                results.append(calibrate(name, run, options.steps))
            print(json.dumps(results[-1]), flush=True)
    print(table(results), file=sys.stderr)


if __name__ == "__main__":
    main()
