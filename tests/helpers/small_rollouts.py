"""Small rollouts, entries and batches for tests of what stores them."""

import numpy as np

from headway.events import Finished
from headway.formats.rollout import encode_samples
from headway.protocols import Entry
from headway.types import Admission, Batch, Prompt, ReadyGroup, Rollout, Sample


def small_rollout(group, member=0, *, version=0, tokens=6):
    """Two observed tokens, then sampled ones, all by one version."""
    sampled = np.arange(tokens) >= 2
    sample = Sample(
        token_ids=np.arange(tokens, dtype=np.int32) + group,
        sampled_mask=sampled,
        loss_mask=sampled.copy(),
        logprobs=np.where(sampled, np.float32(-1), np.float32(0)),
        span_start=np.array([0], np.int32),
        span_version=np.array([version], np.int32),
    )
    return Rollout(
        group=group,
        member=member,
        attempt=1,
        prompt_id=f"prompt-{group}",
        environment="guess",
        reward=float(member),
        rewards={},
        finish="stop",
        turns=1,
        started=1.0,
        finished=2.0,
        engine="engine-0",
        metadata={},
        samples=1,
        tokens=tokens,
        sampled_tokens=tokens - 2,
        head=version,
        tail=version,
        payload=encode_samples([sample]),
    )


def finished(rollout, time=1.0):
    """The journal entry of a finished rollout."""
    r = rollout
    return Entry(Finished(time, r.group, r.member, r.attempt, r.reward, r.tokens, r.sampled_tokens, r.head, r.tail), rollout)


def small_batch(k=0, *, groups=2, version=0):
    """Groups of two members with opposite advantages."""
    ready = tuple(
        ReadyGroup(
            Admission(group, Prompt(f"prompt-{group}", 0, {}), 2, version),
            tuple(small_rollout(group, member, version=version) for member in range(2)),
            (-1.0, 1.0),
        )
        for group in range(groups)
    )
    return Batch(k, ready, 2, "mask", 1.0)
