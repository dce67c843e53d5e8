"""What becomes of the prompt of a group that lost too many members: tried again, left for this epoch, or never tried again.

    lost to the prompt itself (every member: prompt_too_long)      -> quarantined at once
    the max_prompt_failures-th such group of the prompt in a row   -> quarantined; after PATIENCE times as many while nothing works
    the last member lost to infrastructure                         -> tried again
    otherwise (it would end alike: a reward that is no number ...) -> not tried again in this epoch, and the failure counts

"In a row": a group of the prompt that becomes ready starts the count anew (`LedgerView.failures`). A member that the run itself has
cancelled says nothing about the prompt: it is tried again, and nothing counts. When groups of other prompts are lost as well and none
becomes ready, a service may be down: the run then ends by run.max_empty_batches, and no prompt should be in quarantine for it, which has
no end. The patience has one, or prompts that never work, when they are the last of the data, would end a run that could have ended well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from headway.types import Cause

INFRASTRUCTURE: frozenset[Cause] = frozenset({"environment_error", "engine_error", "worker_died", "timeout", "score_error"})

PATIENCE = 4


class Verdict(msgspec.Struct, frozen=True):
    """The cause by which the group is dropped, whether its prompt is tried again, and why it never will be ("": it may be)."""

    cause: Literal["incomplete", "cancelled"]
    requeued: bool
    quarantined: str = ""


def verdict(*, failures: int, failed_in_row: int, lost: Sequence[Cause], members: int, max_prompt_failures: int) -> Verdict:
    """Judge. `lost`: causes of the members lost, in order, at least one.

    `failures`: groups of this prompt in a row that failed before; `failed_in_row`: groups of any prompt (`LedgerView.failed_in_row`).
    """
    infrastructure = lost[-1] in INFRASTRUCTURE
    nothing_works = infrastructure and failed_in_row > failures  # groups of others failed too, and none became ready since
    if "cancelled" in lost:
        return Verdict("cancelled", requeued=True)
    if all(cause == "prompt_too_long" for cause in lost):
        return Verdict("incomplete", requeued=False, quarantined="the prompt is too long for the engine's context")
    if failures + 1 >= max_prompt_failures * (PATIENCE if nothing_works else 1):
        groups = "1 group of it" if failures == 0 else f"{failures + 1} groups of it in a row"
        return Verdict("incomplete", requeued=False, quarantined=f"{groups} lost too many members, the last of {members} to {lost[-1]}")
    return Verdict("incomplete", requeued=infrastructure)
