"""Plays the runs of the study and appends a row per run to a JSONL file; started again, it plays what is missing.

    python examples/study/run.py                    # the whole grid: 748 runs, 45 minutes of CPU time
    python examples/study/run.py --short            # a corner of it, about a minute
    python examples/study/report.py                 # then: the tables and the pictures

Every run is one process's single-threaded work and comes out the same, bit for bit, on one machine. Runs are independent:
`--jobs` processes share them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import torch
from grid import LAG_ARMS, SEEDS, STEPS, collapse, deciding
from play import ARMS, Cell, play
from row import row_of

RESULTS = Path(__file__).parent / "results.jsonl"
SHORT_STEPS, SHORT_SHARES = 10, (0.0, 1.0)


def main() -> None:
    """Play what the command line asks for."""
    options = _options()
    cells = _cells(options)
    if options.part is not None:
        _play(_missing(cells[options.part :: options.jobs], options.out), options.out)  # dealt first: others may have written meanwhile
        return
    sys.stdout.write(f"{len(_missing(cells, options.out))} runs to play into {options.out}\n")
    processes = [
        subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--part", str(part)], env=os.environ | {"OMP_NUM_THREADS": "1"})
        for part in range(options.jobs)
    ]
    failed = [process.args for process in processes if process.wait()]
    if failed:
        raise SystemExit(f"failed: {failed}; start again to play what is missing")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default="", help=f"comma-separated, of {', '.join(ARMS)}; default: all")
    parser.add_argument("--study", choices=("deciding", "collapse", "both"), default="both")
    parser.add_argument("--seeds", type=int, default=0, help=f"seeds per place in the grid; default: {SEEDS}, and 3 in the collapse")
    parser.add_argument("--steps", type=int, default=STEPS, help="batches of a run")
    parser.add_argument("--short", action="store_true", help=f"one seed, {SHORT_STEPS} batches, shares 0 and 1, no collapse")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [arm for arm in options.arms.split(",") if arm and arm not in ARMS]
    if unknown:
        parser.error(f"--arms: {', '.join(unknown)}: is none of {', '.join(ARMS)}")
    return options


def _cells(options: argparse.Namespace) -> list[Cell]:
    arms = options.arms.split(",") if options.arms else list(ARMS)
    if options.short:
        return deciding(arms, seeds=1, steps=SHORT_STEPS, shares=SHORT_SHARES)
    cells: list[Cell] = []
    if options.study != "collapse":
        cells += deciding(arms, seeds=options.seeds or SEEDS, steps=options.steps)
    if options.study != "deciding":
        cells += collapse([arm for arm in LAG_ARMS if arm in arms], seeds=options.seeds or 3, steps=options.steps)
    return cells


def _missing(cells: list[Cell], out: Path) -> list[Cell]:
    fields = Cell.__struct_fields__
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    there = {tuple(row[name] for name in fields) for row in rows}
    return [cell for cell in cells if tuple(getattr(cell, name) for name in fields) not in there]


def _play(cells: list[Cell], out: Path) -> None:
    os.nice(10)
    logging.getLogger("headway").setLevel(logging.ERROR)  # warnings of low coverage are what these runs are about
    torch.set_num_threads(1)
    with out.open("a") as file:
        for cell in cells:
            file.write(json.dumps(row_of(play(cell))) + "\n")
            file.flush()  # one write: the processes' lines do not mix


if __name__ == "__main__":
    main()
