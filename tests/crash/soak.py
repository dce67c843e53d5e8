# ruff: noqa: T201 -- a program for people
"""Twenty minutes of a real run under kills of everything around it (`make soak`): what the orchestrator holds stays flat.

Engines, trainer and worker are killed again and again; the orchestrator never. Its memory, open files and threads are read every two
seconds. At the end it is asked to drain, and the run is held to the ten invariants.

Memory is judged by version, not by time: the first thousand versions fill what has a limit (SQLite's 2 MB of pages, the threads' pools,
objects that wait for the collector: at tiny steps it comes by every 500 versions). A run that ends before `JUDGED_FROM` says so.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from headway.formats.run_directory import RunDirectory, numbered

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from real_crashes import Target
from soaking import resident_megabytes, slope

SETTINGS: dict[str, Any] = {
    "prompts.epochs": 0,
    "environment.workers": 1,
    "run.keep_batches": 50,
    "run.keep_payloads": 2,
    "trainer.keep_checkpoints": 4,
}
WARM_UP = 1000  # versions; about 10 MB
JUDGED_FROM = 2500  # versions: below, one step of the allocator's looks like a slope
GROWTH = 1.0  # MB per 1000 versions (docs/reliability.md, O02)


def main() -> int:
    """Play it; 0 when everything was flat and every invariant held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    directory = Path(tempfile.mkdtemp(prefix="headway-soak-"))
    samples: list[tuple[int, float, int, int]] = []  # version, MB, files, threads
    version = 0
    kills = 0
    with Target(directory, prompts=64, engines=2, **SETTINGS) as target:
        target.begin()
        orchestrator, started = psutil.Process(target.playing.process.pid), time.monotonic()
        due = draw.uniform(5, 15)
        while (now := time.monotonic() - started) < options.minutes * 60:
            if not target.alive:
                print(target.end().err[-4000:])
                return 1
            if now > due:
                kills += target.kill(victim := draw.choice(["engine", "trainer", "worker"]), draw)
                due = now + draw.uniform(5, 15)
                print(f"{now:7.0f} s: {victim} killed; {samples[-1] if samples else ''}", flush=True)
            version = max([version, *numbered(RunDirectory(target.run).weights)])
            samples.append((version, resident_megabytes(orchestrator.pid), orchestrator.num_fds(), orchestrator.num_threads()))
            time.sleep(2)
        target.playing.signal(signal.SIGTERM)
        ended = target.end()
        target.check()
    settled = [sample for sample in samples if sample[0] > WARM_UP] or samples[-1:]
    print(f"{version} versions, {kills} kills, exit code {ended.code}; (version, MB, files, threads) {settled[0]} to {settled[-1]}")
    flat = True
    if version < JUDGED_FROM:
        print(f"fewer than {JUDGED_FROM} versions: too few to tell growth from warm-up")
    else:
        growth = {name: slope([(s[0] / 1000, s[at]) for s in settled]) for at, name in ((1, "MB"), (2, "files"), (3, "threads"))}
        print("slopes per 1000 versions: " + ", ".join(f"{value:+.3f} {name}" for name, value in growth.items()))
        flat = growth["MB"] < GROWTH and abs(growth["files"]) < 2 and abs(growth["threads"]) < 2
    shutil.rmtree(directory, ignore_errors=True)
    return 0 if flat and ended.code == 143 else 1


if __name__ == "__main__":
    sys.exit(main())
