"""Runs in which somebody is killed: settings under which none of them times out, what was logged, and that each batch was trained once."""

import json

from real_runs import Ended, audit, history

from headway.events import BatchFormed

SLOW = ["environment.entry=world:slow", "run.drain_timeout_seconds=60", "rollout.timeout_seconds=600"]


def logged(ended: Ended) -> str:
    return (ended.run.directory / "events.log").read_text()


def trained_once(ended: Ended, steps: int) -> None:
    """Every batch was formed once, and consumed once: the versions that exist are the steps of one line."""
    assert (ended.code, ended.recorded["cause"]) == (0, f"all {steps} steps are trained"), ended.err
    assert [event.k for event in history(ended) if isinstance(event, BatchFormed)] == list(range(steps))
    metrics = sorted((ended.run.directory / "trainer" / "metrics").glob("*.json"))
    assert [json.loads(path.read_bytes())["batch"] for path in metrics] == list(range(steps))
    assert audit(ended, max_staleness=2).trained == steps
