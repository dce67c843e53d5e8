"""How groups become batches, as a config has it, and which of their members may be in the loss by it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from headway.rules.admission import GateLimits
from headway.rules.staleness import can_contribute
from headway.types import ReadyGroup, Rollout


class SinkPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of [rollout] that concern the train sink and are no limits of admission."""

    temperature: float
    whole_groups_only: bool = False
    overlong: str = "keep"
    most_replaced: int = 0  # zero-advantage groups per batch, with dynamic_sampling
    scored_apart: bool = False  # a scorer gave the rewards: Ready records them

    def keeps_out(self, rollout: Rollout) -> bool:
        """Whether a rollout hit a length limit and is kept out of the loss for it."""
        return self.overlong == "mask" and rollout.finish != "stop"

    def kept_out(self, groups: Iterable[ReadyGroup]) -> frozenset[tuple[int, int]]:
        """Return (group, member) of those that are kept out of the loss."""
        if self.overlong != "mask":
            return frozenset()
        return frozenset((rollout.group, rollout.member) for group in groups for rollout in group.rollouts if self.keeps_out(rollout))

    def contributing(self, ready: ReadyGroup, k: int, limits: GateLimits) -> Iterator[float]:
        """Yield the advantages of those members of which a token may contribute to batch k."""
        for rollout, advantage in zip(ready.rollouts, ready.advantages, strict=True):
            if can_contribute(rollout, k, limits.max_staleness, limits.on_stale) and not self.keeps_out(rollout):
                yield advantage
