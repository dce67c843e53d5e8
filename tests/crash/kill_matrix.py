# ruff: noqa: T201 -- a program for people
"""The full matrix of kills, as `make crash` plays it: at least 200 points, a line for each, a summary at the end.

Each part is a run with everything around it, in a directory of its own. What a part came to is kept in results.jsonl: started again, the
matrix goes on with the parts that are missing. A part that fails is reported with its directory, which stays; the others are played all the
same, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from headway.types import OnStale

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from real_crashes import VICTIMS, Embedded, Target, die_at_commits, torment

POINTS = 10  # of a run between fakes
PROMPTS = 5  # a point
MODES: tuple[OnStale, ...] = ("mask", "drop", "wait")


def parts(points: int) -> list[tuple[str, int]]:
    """Return the names and seeds of as many parts as it takes."""
    embedded, commits = max(1, points // 60), max(1, points // 60)
    fakes = -(-(points - embedded * POINTS // 2 - commits * 2 * POINTS) // POINTS) + 3  # a run may end before its last points
    return [*(("embedded", n) for n in range(embedded)), *(("commits", n) for n in range(commits)), *(("fakes", n) for n in range(fakes))]


def play(kind: str, number: int, directory: Path) -> tuple[Counter[str], Counter[str]]:
    """Play one part; return kills by victim, and what became of what was live."""
    mode = MODES[number % len(MODES)]

    def tell(line: str) -> None:
        print(f"  {kind} {number} ({mode}): {line}", flush=True)

    if kind == "embedded":
        with Embedded(directory, prompts=3 * POINTS, mode=mode) as target:
            told = torment(target, number, POINTS // 2, tell=tell)
    elif kind == "commits":
        with Target(directory, prompts=8 * POINTS, mode=mode) as target:
            told = die_at_commits(target, range(1 + number * POINTS, 1 + (number + 1) * POINTS), tell=tell)
    else:
        workers = number % 3 == 0
        settings = {"environment.workers": 1} if workers else {}
        with Target(directory, prompts=PROMPTS * POINTS, mode=mode, engines=1 + number % 2, **settings) as target:
            told = torment(target, number, POINTS, victims=(*VICTIMS, "worker") if workers else VICTIMS, tell=tell)
    return told.kills, told.became


def main() -> int:
    """Play what is missing, and sum up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--directory", type=Path, default=Path("runs/crash"))
    parser.add_argument("--only", default="", help="play the parts of this kind only: fakes, commits, embedded")
    parser.add_argument("--again", action="store_true", help="forget what was played before")
    options = parser.parse_args()
    if options.again:
        shutil.rmtree(options.directory, ignore_errors=True)
    options.directory.mkdir(parents=True, exist_ok=True)
    results = options.directory / "results.jsonl"
    done = {row["part"]: row for row in map(json.loads, results.read_text().splitlines())} if results.exists() else {}
    failed = []
    for kind, number in parts(options.points):
        name = f"{kind}-{number}"
        if name in done or not name.startswith(options.only):
            continue
        directory, started = options.directory / name, time.monotonic()
        shutil.rmtree(directory, ignore_errors=True)
        try:
            kills, became = play(kind, number, directory.absolute())
        except Exception:  # noqa: BLE001 -- whatever a part comes to, the others are played
            failed.append(name)
            print(f"  {name} FAILED, see {directory}: {traceback.format_exc()}", flush=True)
            continue
        done[name] = {"part": name, "kills": kills, "became": became, "seconds": round(time.monotonic() - started, 1)}
        with results.open("a") as out:
            out.write(json.dumps(done[name]) + "\n")
        shutil.rmtree(directory, ignore_errors=True)
    kills = sum((Counter(row["kills"]) for row in done.values()), Counter())
    became = sum((Counter(row["became"]) for row in done.values()), Counter())
    print(f"{kills.total()} kills: {', '.join(f'{count} {victim}' for victim, count in kills.most_common())}")
    print("\n".join(f"{count:8} {what}" for what, count in sorted(became.items())))
    print(f"{sum(row['seconds'] for row in done.values()):.0f} s; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
