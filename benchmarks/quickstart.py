"""The quickstart, really run: wall seconds and batches to a reward, per seed; then synchronous against asynchronous.

Arms of the comparison: `tool` has a lognormal tool latency (mean .3 s) in the environment, `plain` has none (both sides share two
cores, so there is little to overlap). Both arms of a pair run the same config but for the bound. Prints a JSON line per part.

    python benchmarks/quickstart.py                     # all parts, about half an hour on two idle cores
    python benchmarks/quickstart.py --parts seeds --seeds 0 1
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "guess" / "run.toml"
SLOW = ROOT / "benchmarks" / "quickstart_arms" / "run.toml"


def play(config: Path, overrides: dict[str, Any], flags: tuple[str, ...] = (), timeout: float = 1500) -> dict[str, Any]:
    """Run a config to its end; return its batches' rows, their wall times since the start, and the whole wall time."""
    with tempfile.TemporaryDirectory() as directory:
        overrides = {"run.directory": f"{directory}/run", "metrics.progress": "none", **overrides}
        command = [sys.executable, "-m", "headway", "run", str(config), *flags]
        command += [part for key, value in overrides.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        started = time.time()
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        wall = time.time() - started
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-2000:]}")
        rows = [json.loads(line) for line in (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()]
    return {"wall_seconds": wall, "rows": rows, "started": started}


def crossing(run: dict[str, Any], reward: float, over: int = 10) -> tuple[int, float] | None:
    """Return (batches, wall seconds) at which the mean reward of the last `over` batches first reached `reward`."""
    rows = run["rows"]
    for index in range(over - 1, len(rows)):
        if statistics.fmean(row["reward_mean"] for row in rows[index - over + 1 : index + 1]) >= reward:
            return index + 1, rows[index]["time"] - run["started"]
    return None


def summary(run: dict[str, Any], reward: float) -> dict[str, Any]:
    """Return the figures of one run."""
    rows = run["rows"]
    crossed = crossing(run, reward)
    return {
        f"batches_to_{reward}": crossed and crossed[0],
        f"seconds_to_{reward}": crossed and round(crossed[1], 1),
        "wall_seconds": round(run["wall_seconds"], 1),
        "batches": len(rows),
        "reward_last_10": round(statistics.fmean(row["reward_mean"] for row in rows[-10:]), 3),
        "token_staleness_max": max(row["token_staleness_max"] for row in rows),
        "masked_share": round(sum(r["masked_tokens"] for r in rows) / sum(r["masked_tokens"] + r["contributing_tokens"] for r in rows), 5),
        "trainer_step_seconds_median": round(statistics.median(row["step_seconds"] for row in rows), 4),
    }


def seeds(numbers: list[int]) -> dict[str, Any]:
    """Run the quickstart under several seeds, to 200 batches, without its early end."""
    runs = {}
    for seed in numbers:
        runs[seed] = summary(play(CONFIG, {"run.seed": seed, "run.steps": 200, "run.finish_when.over_batches": 1000}), 0.9)
        print(f"seed {seed}: {runs[seed]}", file=sys.stderr)
    walls = [run["wall_seconds"] for run in runs.values()]
    return {
        "benchmark": "quickstart/seeds",
        "cpus": os.cpu_count(),
        "runs": runs,
        "reached_0.9": sum(run["batches_to_0.9"] is not None for run in runs.values()),
        "ended_above_0.9": sum(run["reward_last_10"] >= 0.9 for run in runs.values()),
        "wall_seconds_median": statistics.median(walls),
    }


def pair(name: str, config: Path, common: dict[str, Any]) -> dict[str, Any]:
    """Run a config synchronously and asynchronously, to the same reward."""
    common = {"run.seed": 0, "run.finish_when.reward_above": 0.8, "run.finish_when.over_batches": 10, "run.steps": 300, **common}
    synchronous = summary(play(config, common, ("--synchronous",)), 0.8)
    asynchronous = summary(play(config, common), 0.8)
    ratio = None
    if synchronous["seconds_to_0.8"] and asynchronous["seconds_to_0.8"]:
        ratio = round(synchronous["seconds_to_0.8"] / asynchronous["seconds_to_0.8"], 2)
    return {"benchmark": f"quickstart/{name}", "synchronous": synchronous, "asynchronous": asynchronous, "speedup_to_0.8": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["seeds", "tool", "plain"], choices=["seeds", "tool", "plain"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    options = parser.parse_args()
    if "seeds" in options.parts:
        print(json.dumps(seeds(options.seeds)), flush=True)
    if "tool" in options.parts:
        print(json.dumps(pair("tool", SLOW, {})), flush=True)
    if "plain" in options.parts:
        print(json.dumps(pair("plain", CONFIG, {})), flush=True)


if __name__ == "__main__":
    main()
