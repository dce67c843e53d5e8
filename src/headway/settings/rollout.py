"""The section [rollout], and what follows from its keys taken together."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headway.settings.section import NotNegative, NotNegativeInt, Section
from headway.types import Enforce, OnStale


class RolloutSection(Section, frozen=True, kw_only=True):
    """How prompts become rollouts and rollouts become batches, and how far generation may run ahead of training."""

    groups_per_batch: Annotated[int, Meta(ge=1, description="Groups (prompts) that one trainer step consumes.")] = 32
    group_size: Annotated[int, Meta(ge=1, description="Rollouts per prompt, compared with each other.")] = 8
    max_concurrent: Annotated[
        int, Meta(ge=1, description="Rollouts in flight at most, training and evaluation together. At least one group.")
    ] = 512
    max_staleness: Annotated[
        int, Meta(ge=0, description="No token is trained on at more versions behind than this; 0 trains on-policy, synchronously.")
    ] = 8
    steps_ahead: Annotated[
        NotNegative | Literal["auto"] | None,
        Meta(
            description="Batches that admission may run ahead of the served version, at most max_staleness; fractions allowed. "
            'Unset: min(2, max_staleness). `"auto"`: slowly follows what is measured (latency of a group / time between versions + 1).'
        ),
    ] = None
    enforce: Annotated[
        Enforce,
        Meta(
            description="Where max_staleness is kept. `admission`: nothing starts that could be too old when its turn comes. `ship`: engines are "
            "kept full, and what has become too old is masked or dropped when a batch is formed: more waste, never a staler token."
        ),
    ] = "admission"
    batch_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Size batches by tokens (all positions of their rollouts) instead of groups_per_batch; 0: off. "
            "Needs max_rollout_tokens: a batch takes at least batch_tokens / (group_size x max_rollout_tokens) groups.",
        ),
    ] = 0
    max_ready_groups: Annotated[
        int,
        Meta(
            ge=0, description='With `enforce = "ship"`: no group starts while so many complete ones wait; 0: (max_staleness + 1) batches.'
        ),
    ] = 0
    max_ready_bytes: Annotated[
        int, Meta(ge=0, description='With `enforce = "ship"`: no group starts while complete ones hold so many bytes; 0: no limit.')
    ] = 4 * 1024**3
    replayed_groups: Annotated[
        NotNegativeInt | None,
        Meta(
            description="Groups of a batch that may come from [replay] or [ingest] at most. They take the place of live ones, of which one stays. Unset: half a batch.",
        ),
    ] = None
    max_lead: Annotated[
        int,
        Meta(
            ge=0,
            description="Batch k is formed only while k - (newest trained version) is at most this; 1: one batch waits while one trains.",
        ),
    ] = 1
    on_stale: Annotated[
        OnStale,
        Meta(
            description="What happens past max_staleness. `mask`: tokens too old stay as context, out of the loss. `wait`: a batch waits until no "
            "group can become too old. `drop`: groups that would hold a batch up are cancelled and tried again. `train`: no bound, all is trained on."
        ),
    ] = "mask"
    advantage: Annotated[
        str,
        Meta(
            description="`grpo`, `dr_grpo`, `rloo`, `max_rl`, or `module:function` (rewards of a group, float64, to advantages of the same length)."
        ),
    ] = "grpo"
    incomplete: Annotated[
        Literal["partial", "drop"],
        Meta(description="A group that lost members: train on the rest (at least 2), or drop it. Group-scored environments always drop."),
    ] = "partial"
    overlong: Annotated[
        Literal["keep", "mask", "drop"],
        Meta(description="Rollouts that hit a length limit: train as scored, keep out of the loss, or lose the member."),
    ] = "keep"
    filter: Annotated[
        str, Meta(description="`module:function`: takes the list of rewards of a group, returns whether to keep it. Empty: none.")
    ] = ""
    dynamic_sampling: Annotated[
        bool, Meta(description="Replace zero-advantage groups by new ones, at most 3 x groups_per_batch per batch.")
    ] = False
    temperature: Annotated[float, Meta(ge=0, description="Sampling temperature.")] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="Nucleus sampling; 1: off.")] = 1.0
    top_k: Annotated[int, Meta(ge=0, description="Sample from the k likeliest tokens; 0: off.")] = 0
    max_tokens: Annotated[int, Meta(ge=1, description="Tokens of one generation (one turn) at most.")] = 256
    max_rollout_tokens: Annotated[
        int,
        Meta(ge=0, description="Tokens of one sample at most, prompt and observations included; 0: as far as the engine's context goes."),
    ] = 0
    timeout_seconds: Annotated[float, Meta(ge=0, description="A rollout may take this long; 0: no limit.")] = 3600.0
    max_attempts: Annotated[int, Meta(ge=1, description="Attempts per member, the first included, while failures can be retried.")] = 3
    max_prompt_failures: Annotated[
        int,
        Meta(
            ge=1,
            description="A prompt whose group lost too many members is tried again; after so many such groups it is quarantined: never tried again, "
            "and listed by `headway inspect RUN quarantine`.",
        ),
    ] = 3
    max_held_bytes: Annotated[
        int,
        Meta(
            ge=0, description="Payloads of finished rollouts held in memory; beyond, they are read from the journal when they are needed."
        ),
    ] = 2 * 1024**3


def steps_ahead(rollout: RolloutSection) -> float:
    """Return A, how far admission runs ahead (at first, with "auto"): as set, otherwise min(2, max_staleness)."""
    if rollout.steps_ahead is None or rollout.steps_ahead == "auto":
        return float(min(2, rollout.max_staleness))
    return float(rollout.steps_ahead)


def smallest_batch(rollout: RolloutSection) -> int:
    """Return Bmin, the fewest live groups that a batch takes: groups_per_batch, or what always fits into batch_tokens (0: not one)."""
    if not rollout.batch_tokens:
        return rollout.groups_per_batch
    return rollout.batch_tokens // max(1, rollout.group_size * rollout.max_rollout_tokens)


def replayed_groups(rollout: RolloutSection) -> int:
    """Return how many groups of a batch may be replayed or external: as set, otherwise half of the smallest batch."""
    return smallest_batch(rollout) // 2 if rollout.replayed_groups is None else rollout.replayed_groups
