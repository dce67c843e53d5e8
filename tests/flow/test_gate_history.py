"""The gate through any history: what it says is so, and whoever waits gets in as soon as it is open."""

import asyncio
import random

from doubles import Spine, prompt, turns

from headway.events import Finished
from headway.flow.gate import CapacityGate
from headway.rules.admission import GateLimits
from headway.rules.batching import can_form, chosen, groups_to_take
from headway.sim.loop import run

OFTEN = ["admit", "admit", "end", "end", "end", "ready", "ready", "drop", "form", "train", "offer", "fill", "eval", "eval ends", "pause"]


async def _any_history(draw):
    """Whatever happens at the gate and in the ledger, drawn anew each time; return what was seen."""
    spine, g, seen = Spine(), draw.randint(1, 3), set()
    limits = GateLimits(
        groups_per_batch=draw.randint(1, 3),
        group_size=g,
        max_concurrent=g * draw.randint(1, 8),
        steps_ahead=draw.choice([0.0, 0.5, 1.0, 2.0]),
        steps=1000,
        replayed_groups=draw.randint(0, 2),
    )
    door = CapacityGate(limits, watch=spine.watch, record=spine.record, clock=spine.clock)
    groups, evals, places = [], [], []

    def happen(what):
        ledger = spine.ledger
        running = [group for group, unit in ledger.running.items() if unit.ended < unit.members]
        match what:
            case "admit":
                groups.append(asyncio.ensure_future(door.admit(prompt(len(groups)))))
            case "end" if running:
                spine.record(Finished(0.0, draw.choice(running), 0, 0, 1.0, 8, 5, 0, 0))
            case "ready" | "drop" if ledger.running:
                group = draw.choice(list(ledger.running))
                spine.ready_now(group) if what == "ready" else spine.drop(group)
            case "form" if can_form(ledger, limits):
                spine.form(*chosen(ledger, groups_to_take(ledger, limits)))
            case "train" if ledger.trained < ledger.next_batch:
                spine.acknowledge(ledger.trained)
                spine.publish(ledger.trained)
            case "offer":
                places.append(asyncio.ensure_future(door.admit_replayed("theirs", draw.choice(["replay", "external"]), 1)))
            case "fill" if ledger.ingested:
                spine.ready_now(draw.choice(list(ledger.ingested)))
            case "eval":
                evals.append(asyncio.ensure_future(door.admit_eval()))
            case "eval ends" if door.eval_in_flight:
                door.release_eval()
            case "pause":
                door.pause()
                door.resume()

    for _ in range(60):
        happen(draw.choice(OFTEN))
        await turns()
        seen.add(door.reason)
        assert (door.reason == "open") == (door.capacity > 0)
        if door.reason == "open" and all(task.done() for task in evals):
            assert all(task.done() for task in groups), "who waits was forgotten"
    for task in [*groups, *evals, *places]:
        task.cancel()
    return seen


def test_whatever_happens_the_gate_says_open_exactly_when_it_is_and_forgets_nobody_who_waits():
    seen = set()
    for seed in range(150):
        seen |= run(_any_history(random.Random(seed)))
    assert {"open", "staleness", "concurrency"} <= seen
