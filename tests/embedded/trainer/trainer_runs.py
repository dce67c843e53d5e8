"""Hand-made runs: a tiny model, and batches as another program would write them, by the file formats alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from headway.formats.manifest import publish, staging, write_manifest
from headway.formats.run_directory import RunDirectory
from headway.settings import (
    Config,
    EnvironmentSection,
    InitSection,
    ModelSection,
    PromptsSection,
    RolloutSection,
    RunSection,
    TrainerSection,
)

LINEAGE = "c0ffee"
TINY = InitSection(hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8, intermediate_size=32)
BOUND = RolloutSection(max_staleness=2)
VOCABULARY = 57


def arrays_of(k: int, *, groups: int = 4, group_size: int = 2, seed: int = 0) -> dict[str, Any]:
    """Return the arrays of a batch: samples of 3-8 tokens, the first two of each not sampled, stamped with versions k-1 and k."""
    chance = np.random.default_rng([seed, k])
    samples = groups * group_size
    lengths = chance.integers(3, 9, samples)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    mask = position >= 2
    return {
        "token_ids": chance.integers(0, VOCABULARY, offsets[-1], dtype=np.int32),
        "loss_mask": mask.astype(np.uint8),
        "logprobs": np.where(mask, chance.normal(-4, 0.3, offsets[-1]), 0).astype(np.float32),
        "advantages": np.repeat(chance.normal(size=samples), lengths).astype(np.float32),
        "versions": np.where(mask, np.maximum(0, k - chance.integers(0, 2, offsets[-1])), -1).astype(np.int32),
        "sample_offsets": offsets.astype(np.int64),
        "sample_rollout": np.arange(samples, dtype=np.int32),
        "sample_group": np.repeat(np.arange(groups), group_size).astype(np.int32),
        "sample_length": (lengths - 2).astype(np.int32),
    }


def write_batch(run: RunDirectory, k: int, arrays: dict[str, Any] | None = None, *, lineage: str = LINEAGE, **facts: Any) -> Path:
    """Publish batch `k`; `facts` replaces what its manifest says."""
    arrays = arrays_of(k) if arrays is None else arrays
    contributing = arrays["loss_mask"] != 0
    extra = {
        "batch": k,
        "max_staleness": 2,
        "on_stale": "mask",
        "temperature": 1.0,
        "min_contributing_version": int(arrays["versions"][contributing].min(initial=k)),
        "contributing_tokens": int(contributing.sum()),
        "arrays": {name: {"dtype": array.dtype.name, "shape": list(array.shape)} for name, array in arrays.items()},
    } | facts
    final = run.batch(k)
    temporary = staging(final)
    save_file(arrays, temporary / "batch.safetensors")
    write_manifest(temporary, kind="batch", lineage=lineage, id=k, extra=extra)
    publish(temporary, final)
    return final


def config(*, steps: int = 3, init: InitSection | None = TINY, path: str = "", rollout: RolloutSection = BOUND, **trainer: Any) -> Config:
    """Return a config with a tiny model on one thread."""
    return Config(
        run=RunSection(steps=steps, seed=7),
        model=ModelSection(init=init, path=path),
        rollout=rollout,
        prompts=PromptsSection(source="prompts.jsonl"),
        environment=EnvironmentSection(entry="guess:attempt"),
        trainer=TrainerSection(**{"device": "cpu", "threads": 1, "learning_rate": 1e-2, "minibatches": 2, **trainer}),
    )
