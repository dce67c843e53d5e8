"""Tiny checkpoints from random weights, made once a session: the same bytes in every session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

Family = Literal["qwen3", "llama", "qwen3_moe", "qwen3_tied"]
MakeCheckpoint = Callable[[Family, int], Path]

SHAPE: dict[str, Any] = {
    "vocab_size": 57,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.06,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _config(family: Family) -> Any:
    import transformers

    match family:
        case "qwen3":
            return transformers.Qwen3Config(**SHAPE)
        case "llama":  # grouped: two query heads share a key head
            return transformers.LlamaConfig(**SHAPE | {"num_key_value_heads": 2})
        case "qwen3_moe":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
            return transformers.Qwen3MoeConfig(**SHAPE | experts)
        case "qwen3_tied":
            return transformers.Qwen3Config(**SHAPE | {"tie_word_embeddings": True})


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Return the directory of a checkpoint of a family, with the weights of a seed. Shared by the session: copy before changing it."""
    root = tmp_path_factory.mktemp("checkpoints")

    def make(family: Family, seed: int) -> Path:
        import torch
        from transformers import AutoModelForCausalLM

        directory = root / f"{family}-{seed}"
        if not directory.exists():
            torch.set_num_threads(1)
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                AutoModelForCausalLM.from_config(_config(family)).save_pretrained(directory)
        return directory

    return make


@pytest.fixture(scope="session")
def tiny_qwen3(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint("qwen3", 0)


@pytest.fixture(scope="session")
def tiny_llama(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint("llama", 0)
