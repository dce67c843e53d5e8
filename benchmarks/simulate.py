"""How fast runs are simulated: the virtual loop with the components that ship, and the cohort stepper; and what they need of memory.

    python benchmarks/simulate.py [--repeats 3] [--only loop|load|cohorts|memory]

Rollouts that were trained on per second of CPU (this process, one thread), the median over the repeats; `spread` is the largest over the
smallest. Each run is a process of its own, so that `peak_mib` (peak resident memory) is its own. One JSON
line per world:

  loop      256 groups a batch of 1 and of 8 rollouts, fixed speed (aim: 10,000 rollouts/s)
  load      the same through four engines with a batch limit, prefill and a KV limit
  cohorts   256 groups a batch (aim: 4 M rollouts/s), and 40,000 groups a batch with about 100,000 in the system (aim: 10 M)
  memory    100,000 rollouts in flight at once, by the virtual loop and by the stepper
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from headway.settings import RolloutSection
from headway.sim.cohorts import step
from headway.sim.distributions import Lognormal
from headway.sim.figures import summarise
from headway.sim.play import play
from headway.sim.scenario import FleetSection, LengthSection, Scenario, TrainingSection, WorkloadSection
from headway.sim.summary import Summary

NEED = 1.5  # max_concurrent over what the trainer needs


def world(groups: int, members: int, steps: int, *, concurrent: int = 0, fleet: FleetSection | None = None) -> Scenario:
    """A world in which a rollout takes as long as a trainer step, on average, and the tail is heavy (lognormal 1)."""
    return Scenario(
        workload=WorkloadSection(seconds=Lognormal(1.0, 1.0)),
        training=TrainingSection(seconds=1.0, jitter=0.1),
        fleet=fleet or FleetSection(tokens_per_second=100.0, sync_seconds=0.02),
        rollout=RolloutSection(
            groups_per_batch=groups,
            group_size=members,
            max_concurrent=concurrent or round(NEED * groups * members),
            max_staleness=8,
            steps_ahead=2,
            timeout_seconds=0.0,
        ),
        run=LengthSection(steps=steps, warm_up=0),
    )


def loaded(groups: int, members: int, steps: int) -> Scenario:
    """The same on four engines that slow down, queue, prefill and run out of room."""
    fleet = FleetSection(
        engines=4,
        tokens_per_second=150.0,
        half_speed_at=1000.0,
        prefill_tokens_per_second=1e5,
        max_sequences=groups * members // 2,
        kv_tokens=groups * members * 100,
        sync_seconds=0.02,
    )
    return world(groups, members, steps, fleet=fleet)


def by_loop(scenario: Scenario) -> Summary:
    """Simulate on the virtual loop."""
    return summarise(play(scenario))


def by_cohorts(scenario: Scenario) -> Summary:
    """Simulate by the stepper."""
    return step(scenario)


AMPLE = 10**7
WORLDS: dict[str, tuple[str, Callable[[], Scenario], Callable[[Scenario], Summary]]] = {
    "loop, groups of 1": ("loop", lambda: world(256, 1, 80), by_loop),
    "loop, groups of 8": ("loop", lambda: world(256, 8, 12), by_loop),
    "loop, engines under load": ("load", lambda: loaded(256, 1, 80), by_loop),
    "cohorts, 256 a batch": ("cohorts", lambda: world(256, 1, 30_000, concurrent=AMPLE), by_cohorts),
    "cohorts, 256 a batch, max_concurrent binds": ("cohorts", lambda: world(256, 1, 15_000), by_cohorts),
    "cohorts, 256 groups of 8": ("cohorts", lambda: world(256, 8, 10_000, concurrent=AMPLE), by_cohorts),
    "cohorts, 100,000 in the system": ("cohorts", lambda: world(40_000, 1, 1000, concurrent=AMPLE), by_cohorts),
    "memory, loop, 100,000 in flight": ("memory", lambda: world(100_000, 1, 3, concurrent=100_000), by_loop),
    "memory, cohorts, 100,000 in flight": ("memory", lambda: world(100_000, 1, 20, concurrent=100_000), by_cohorts),
}


def measure(name: str) -> None:
    """Simulate one world in this process, and print its line."""
    _, make, simulate = WORLDS[name]
    scenario = make()
    started, began = time.process_time(), time.perf_counter()
    summary = simulate(scenario)
    seconds = time.process_time() - started
    rollouts = summary.batches * scenario.rollout.groups_per_batch * scenario.rollout.group_size
    line = {
        "rollouts": rollouts,
        "rollouts_per_second": round(rollouts / seconds),
        "cpu_seconds": round(seconds, 2),
        "wall_seconds": round(time.perf_counter() - began, 2),
        "in_flight_max": summary.in_flight_max,
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    print(json.dumps(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="loop, load, cohorts or memory")
    parser.add_argument("--world", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.world:
        measure(options.world)
        return
    for name, (kind, _, _) in WORLDS.items():
        if options.only not in {"", kind}:
            continue
        lines = []
        for _ in range(options.repeats if kind != "memory" else 1):
            command = [sys.executable, __file__, "--world", name]
            told = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            lines.append(json.loads(told.stdout.splitlines()[-1]))
        rates = [line["rollouts_per_second"] for line in lines]
        middle = min(lines, key=lambda line: abs(line["rollouts_per_second"] - statistics.median(rates)))
        print(json.dumps({"benchmark": "simulate", "world": name, "spread": round(max(rates) / min(rates), 2), **middle}), flush=True)


if __name__ == "__main__":
    main()
