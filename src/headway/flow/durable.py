"""A finished rollout becomes durable: the event that tells of it, and the one way in which it does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from headway.events import AnyEvent, Finished
from headway.types import Rollout


class Commit(Protocol):
    """Makes an event durable, with the rollout it refers to."""

    def __call__(self, event: AnyEvent, rollout: Rollout | None = None) -> Awaitable[AnyEvent]:
        """Return the event as written, its reference filled in, once it is durable and applied."""
        ...


MakeDurable = Callable[[Rollout], Awaitable[Rollout]]
"""Make a finished rollout durable; return it with its reference, and with its payload or without (`flow.payloads`)."""


def finished_event(rollout: Rollout, now: float) -> Finished:
    """Return the event of a rollout that has finished."""
    return Finished(
        now,
        rollout.group,
        rollout.member,
        rollout.attempt,
        rollout.reward,
        rollout.tokens,
        rollout.sampled_tokens,
        rollout.head,
        rollout.tail,
        environment=rollout.environment,
        turns=rollout.turns,
        seconds=max(0.0, rollout.finished - rollout.started),
        size=len(rollout.payload),
        finish=rollout.finish,
    )
