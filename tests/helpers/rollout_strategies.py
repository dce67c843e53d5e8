"""Hypothesis strategies for samples, rollouts and batches."""

import numpy as np
from hypothesis import strategies as st

from headway.formats.rollout import encode_samples
from headway.types import Admission, Batch, Prompt, ReadyGroup, Rollout, Sample

finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def samples(draw, *, max_tokens=12, max_version=8, extras=True):
    n = draw(st.integers(1, max_tokens))
    sampled = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    loss = sampled & np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    count = int(sampled.sum())
    starts = sorted({0} | draw(st.sets(st.integers(0, count - 1)))) if count else []
    versions = draw(st.lists(st.integers(0, max_version), min_size=len(starts), max_size=len(starts)))
    logprobs = np.array(draw(st.lists(finite32, min_size=n, max_size=n)), np.float32)
    return Sample(
        token_ids=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)), np.int32),
        sampled_mask=sampled,
        loss_mask=loss,
        logprobs=np.where(sampled, logprobs, np.float32(0)),
        span_start=np.array(starts, np.int32),
        span_version=np.array(versions, np.int32),
        policy_id=draw(st.sampled_from(["policy", "adapter-1"])) if extras else "policy",
        extras=draw(extra_arrays) if extras else {},
    )


extra_arrays = st.dictionaries(
    st.sampled_from(["experts", "reference_logprobs", "é"]),
    st.builds(
        lambda dtype, shape: np.arange(int(np.prod(shape)), dtype=np.float64).reshape(shape).astype(dtype),
        st.sampled_from(["bool", "uint8", "int16", "float16", "float64", ">i4"]),
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
    ),
    max_size=2,
)


def rollout_of(encoded, *, group=0, member=0, **fields):
    """A rollout of these samples; `fields` replace its defaults."""
    defaults = {
        "attempt": 1,
        "prompt_id": f"prompt-{group}",
        "environment": "guess",
        "reward": float(member),
        "rewards": {},
        "finish": "stop",
        "turns": 1,
        "started": 1.0,
        "finished": 2.0,
        "engine": "engine-0",
        "metadata": {},
        "samples": len(encoded),
        "tokens": sum(len(sample.token_ids) for sample in encoded),
        "sampled_tokens": sum(int(sample.sampled_mask.sum()) for sample in encoded),
        "head": 0,
        "tail": 0,
        "payload": encode_samples(encoded),
    }
    return Rollout(group=group, member=member, **{**defaults, **fields})


def plain_sample(versions, *, prompt=2):
    """A sample with `prompt` observed tokens, then one sampled token in the loss per version given."""
    n = prompt + len(versions)
    sampled = np.arange(n) >= prompt
    stamps = [(i, version) for i, version in enumerate(versions) if i == 0 or versions[i - 1] != version]
    return Sample(
        token_ids=np.arange(n, dtype=np.int32),
        sampled_mask=sampled,
        loss_mask=sampled.copy(),
        logprobs=np.where(sampled, np.float32(-0.5), np.float32(0)),
        span_start=np.array([start for start, _ in stamps], np.int32),
        span_version=np.array([version for _, version in stamps], np.int32),
    )


def batch_of(groups, *, k, max_staleness, on_stale="mask", overlong_masked=frozenset(), advantages=None):
    """A batch of groups given as lists of rollouts, all born at version 0; advantages default to the member's number minus one."""
    ready = tuple(
        ReadyGroup(
            Admission(group=10 + i, prompt=Prompt(id=f"prompt-{i}", epoch=0, fields={}), members=len(rollouts), birth=0),
            tuple(rollouts),
            tuple(advantages[i]) if advantages else tuple(float(rollout.member) - 1 for rollout in rollouts),
        )
        for i, rollouts in enumerate(groups)
    )
    return Batch(k, ready, max_staleness, on_stale, 0.75, frozenset(overlong_masked))


@st.composite
def batches(draw):
    sample_lists = st.lists(samples(max_tokens=8, extras=False), min_size=1, max_size=3)
    shapes = draw(st.lists(st.lists(sample_lists, min_size=1, max_size=3), min_size=1, max_size=3))
    groups = [[rollout_of(s, group=10 + i, member=j) for j, s in enumerate(members)] for i, members in enumerate(shapes)]
    everyone = [(rollout.group, rollout.member) for group in groups for rollout in group]
    on_stale = draw(st.sampled_from(["mask", "wait", "drop", "train"]))
    return batch_of(
        groups,
        k=8,
        max_staleness=draw(st.integers(0 if on_stale in {"mask", "train"} else 8, 9)),  # wait and drop let nothing older come so far
        on_stale=on_stale,
        overlong_masked=draw(st.sets(st.sampled_from(everyone))),
    )
