"""What becomes of the prompt of a group that lost too many members: tried again, left for this epoch, or never tried again.

    lost to the prompt itself (every member: prompt_too_long)      -> quarantined at once
    the max_prompt_failures-th such group of the prompt in a row   -> quarantined
    the last member lost to infrastructure                         -> tried again
    otherwise (it would end alike: a reward that is no number ...) -> not tried again in this epoch, and the failure counts

"In a row": a group of the prompt that becomes ready starts the count anew (`LedgerView.failures`). A member that the run itself has
cancelled says nothing about the prompt: it is tried again, and nothing counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from headway.types import Cause

INFRASTRUCTURE: frozenset[Cause] = frozenset({"environment_error", "engine_error", "worker_died", "timeout", "score_error"})


class Verdict(msgspec.Struct, frozen=True):
    """The cause by which the group is dropped, whether its prompt is tried again, and why it never will be ("": it may be)."""

    cause: Literal["incomplete", "cancelled"]
    requeued: bool
    quarantined: str = ""


def verdict(*, failures: int, lost: Sequence[Cause], members: int, max_prompt_failures: int) -> Verdict:
    """Judge. `lost`: causes of the members lost, in order, at least one; `failures`: groups of this prompt in a row that failed before."""
    if "cancelled" in lost:
        return Verdict("cancelled", requeued=True)
    if all(cause == "prompt_too_long" for cause in lost):
        return Verdict("incomplete", requeued=False, quarantined="the prompt is too long for the engine's context")
    if failures + 1 >= max_prompt_failures:
        groups = "1 group of it" if failures == 0 else f"{failures + 1} groups of it in a row"
        return Verdict("incomplete", requeued=False, quarantined=f"{groups} lost too many members, the last of {members} to {lost[-1]}")
    return Verdict("incomplete", requeued=lost[-1] in INFRASTRUCTURE)
