"""What becomes of a rollout that finished and will not be seen by any batch: its loss is recorded, with its cause."""

from __future__ import annotations

from headway.events import RolloutDropped
from headway.types import Cause, Rollout


def lost_after_finishing(rollout: Rollout, cause: Cause, detail: str, *, now: float) -> RolloutDropped:
    """Return the event; the member had ended already, so only the reports change."""
    return RolloutDropped(
        now, rollout.group, rollout.member, rollout.attempt, cause, detail, rollout.sampled_tokens, final=True, finished=True
    )
