"""Versions of a tiny Qwen3, made by headway's own initialiser, and what each says of any sequence, in float32 and without an engine.

The versions are drawn from different seeds: weights that have nothing in common, so that a token of one is improbable under another.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headway.embedded.trainer.initialise import random_model, with_dtype
from headway.formats.manifest import publish, staging, write_manifest
from headway.settings import InitSection
from headway.types import Checkpoint

LINEAGE = "abc123"
INIT = InitSection(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=32,  # vLLM's attention on CPUs takes this, and not 16
    intermediate_size=128,
    max_position_embeddings=1024,
    initializer_range=0.1,
)
WEIGHTS_FILE = "model.safetensors"
RANK = 4
ADAPTED = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}

torch.set_num_threads(1)  # the server has the other core

Tensors = dict[str, torch.Tensor]


def write_version(directory: Path, version: int, tensors: Tensors | None = None) -> Checkpoint:
    """Write `directory`/<version>, whole and with a manifest; `tensors`: in place of the version's own, drawn from its number."""
    final = directory / f"{version:08d}"
    temporary = staging(final)
    model, files = random_model(INIT, seed=version)
    for name, content in with_dtype(files, torch.bfloat16).items():
        (temporary / name).write_bytes(_without_end(content) if name.endswith("config.json") else content)
    own = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(own if tensors is None else tensors, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
    write_manifest(temporary, kind="weights", lineage=LINEAGE, id=version, extra={})
    publish(temporary, final)
    return Checkpoint(version, f"{LINEAGE}-{version}", str(final))


def _without_end(config: bytes) -> bytes:
    """Leave out of a config which token ends a text: random models would write it every 57 tokens, and answers shall be long."""
    return json.dumps({name: value for name, value in json.loads(config).items() if name not in {"eos_token", "eos_token_id"}}).encode()


def tensors_of(checkpoint: Checkpoint) -> Tensors:
    """The tensors of a version."""
    return load_file(Path(checkpoint.directory) / WEIGHTS_FILE)


def write_adapter(directory: Path, version: int, base: Checkpoint, *, lineage: str = LINEAGE) -> Checkpoint:
    """Write a LoRA adapter as PEFT does, drawn from its number."""
    adapter, _ = _adapted(version, base)
    final = directory / f"{version:08d}"
    temporary = staging(final)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "target_modules": sorted(ADAPTED)}
    (temporary / "adapter_config.json").write_text(json.dumps(config))
    save_file(adapter, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
    write_manifest(temporary, kind="weights", lineage=lineage, id=version, extra={})
    publish(temporary, final)
    return Checkpoint(version, f"{lineage}-{version}", str(final))


def write_merged(directory: Path, version: int, base: Checkpoint) -> Checkpoint:
    """Write the checkpoint that the base and the adapter of a version come to together; of version 0 that is the base."""
    return write_version(directory, version, _adapted(version, base)[1]) if version else base


def _adapted(version: int, base: Checkpoint) -> tuple[Tensors, Tensors]:
    """Return a version's adapter, and the weights that it makes of the base."""
    chance = torch.Generator().manual_seed(1000 + version)
    adapter: Tensors = {}
    merged = tensors_of(base)
    for name in [name for name in merged if name.split(".")[-2] in ADAPTED]:
        module = "base_model.model." + name.removesuffix(".weight")
        rows, columns = merged[name].shape
        down = (torch.randn(RANK, columns, generator=chance) * 0.25).to(torch.bfloat16)
        up = (torch.randn(rows, RANK, generator=chance) * 0.25).to(torch.bfloat16)
        adapter |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
        merged[name] = merged[name].float() + up.float() @ down.float()
    return adapter, merged


@functools.lru_cache(maxsize=8)
def _loaded(directory: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()


def logprobs_under(checkpoint: Checkpoint, prompt: list[int], written: list[int]) -> npt.NDArray[np.float32]:
    """Return the log-probability of each id of `written` after `prompt` and those before it, under a version's weights in float32."""
    ids = torch.tensor([[*prompt, *written]])
    with torch.inference_mode():
        logits = _loaded(checkpoint.directory)(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    found: npt.NDArray[np.float32] = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
    return found
