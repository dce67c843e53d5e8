"""What the bound costs: per event of the ledger and per decision, with 10^3, 10^4 and 10^5 live groups.

    python benchmarks/bound.py [--live 1000,10000,100000] [--repeats 9] [--calls 2000]

The older half of the live groups is ready, the rest runs; births are spread over max_staleness + 1 = 9 versions, and H(k) holds. CPU
microseconds of one call: each figure is the median over the repeats of the mean of `calls` calls. One JSON line per number of live groups.

  events     admitted, finished, attempt_dropped, ready, dropped, published, acknowledged; formed: per group of the batch
  decisions  capacity, can_form (wait), holds_after, in_the_way (drop, nothing is), place (replay, wait)
  chosen     the oldest-birth groups of one batch, per ready group: once a batch, it looks at every ready group
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from headway.events import Admitted, AnyEvent, BatchAcknowledged, BatchFormed, Finished, GroupDropped, Published, Ready, RolloutDropped
from headway.rules.admission import GateLimits, capacity
from headway.rules.batching import can_form, chosen, in_the_way
from headway.rules.deadlines import holds, holds_after
from headway.rules.ledger import Ledger, apply
from headway.rules.replay import place

BOUND = 8


def a_ledger(live: int) -> tuple[Ledger, GateLimits]:
    """Return a ledger with `live` groups of one rollout, and limits under which it is what a run would hold."""
    per_batch = live // (BOUND + 1) + 1
    limits = GateLimits(
        groups_per_batch=per_batch,
        group_size=1,
        max_concurrent=10 * live,
        steps_ahead=BOUND,
        steps=10**9,
        max_staleness=BOUND,
        on_stale="wait",
        replayed_groups=per_batch // 2,
    )
    ledger = Ledger(version=0, trained=BOUND, next_batch=BOUND)
    for group in range(live):
        birth = group * (BOUND + 1) // live
        apply(ledger, Published(0.0, birth, ("engine-0",)))
        apply(ledger, Admitted(0.0, group, f"prompt-{group}", 0, 1, birth))
        if group < live // 2:
            apply(ledger, Finished(0.0, group, 0, 0, 1.0, 100, 100, birth, birth))
            apply(ledger, Ready(1.0, group, zero_advantage=False))
    if not holds(ledger.births, ledger.next_batch, limits, {}) or len(ledger.ready) < per_batch:
        raise RuntimeError("these groups are none that a run would hold")
    return ledger, limits


def event_costs(ledger: Ledger, calls: int) -> Iterator[tuple[str, float]]:
    """Apply events of every kind, so that as many groups are live afterwards; yield (kind, seconds per event)."""
    first = ledger.next_group
    groups = range(first, first + calls)
    version = ledger.version
    for name, events in (
        ("admitted", [Admitted(2.0, group, f"prompt-{group}", 0, 1, version) for group in groups]),
        ("attempt_dropped", [RolloutDropped(2.0, group, 0, 0, "environment_error", "it failed", 10, final=False) for group in groups]),
        ("finished", [Finished(2.0, group, 0, 1, 1.0, 100, 100, version, version) for group in groups]),
        ("ready", [Ready(3.0, group, zero_advantage=False) for group in groups]),
        ("dropped", [GroupDropped(3.0, group, "stale", "too old", 100) for group in groups[: calls // 2]]),
        ("formed", [BatchFormed(3.0, ledger.next_batch, tuple(groups[calls // 2 :]), 0.5)]),
        ("published", [Published(3.0, version, ("engine-0",)) for _ in groups]),
        ("acknowledged", [BatchAcknowledged(3.0, ledger.next_batch - 1) for _ in groups]),
    ):
        per_event = _seconds(partial(_apply_all, ledger, events))
        yield name, per_event / (len(groups[calls // 2 :]) if name == "formed" else len(events))


def _apply_all(ledger: Ledger, events: Sequence[AnyEvent]) -> None:
    for event in events:
        apply(ledger, event)


def decision_costs(ledger: Ledger, limits: GateLimits, calls: int) -> Iterator[tuple[str, float]]:
    """Yield (decision, seconds per call)."""
    n = limits.groups_per_batch
    drop = msgspec.structs.replace(limits, on_stale="drop")
    if in_the_way(ledger, drop, n):
        raise RuntimeError("something is in the way")
    decisions: dict[str, Callable[[], object]] = {
        "capacity": partial(capacity, ledger, limits),
        "can_form": partial(can_form, ledger, limits),
        "holds_after": partial(holds_after, ledger, limits, n),
        "in_the_way": partial(in_the_way, ledger, drop, n),
        "place": partial(place, ledger, limits),
    }
    for name, decide in decisions.items():
        yield name, _seconds(partial(_call, decide, calls)) / calls
    yield "chosen_per_ready_group", _seconds(partial(chosen, ledger, n)) / len(ledger.ready)


def _call(decide: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        decide()


def _seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of this thread: others share the machine."""
    started = time.thread_time()
    work()
    return time.thread_time() - started


def measure(live: int, repeats: int, calls: int) -> dict[str, dict[str, float]]:
    """Return microseconds by event and by decision."""
    decisions, events = [], []
    for _ in range(repeats):
        ledger, limits = a_ledger(live)
        decisions.append(dict(decision_costs(ledger, limits, calls)))
        events.append(dict(event_costs(ledger, calls)))
    return {"events_us": _medians(events), "decisions_us": _medians(decisions)}


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(1e6 * statistics.median(costs[name] for costs in rounds), 3) for name in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", default="1000,10000,100000")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args()
    for live in map(int, options.live.split(",")):
        row = {"benchmark": "bound", "live_groups": live, "max_staleness": BOUND, "python": platform.python_version()}
        print(json.dumps({**row, **measure(live, options.repeats, options.calls)}), flush=True)


if __name__ == "__main__":
    main()
