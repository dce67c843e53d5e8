"""The versions that `sync.py` brings to an engine: random weights of which a share changes each time, offered as a trainer does it."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from headway.formats import shared_memory
from headway.formats.delta import TENSORS, write_delta
from headway.formats.manifest import publish, staging, write_manifest
from headway.formats.run_directory import RunDirectory

LINEAGE = "bench"


def make_model(directory: Path) -> None:
    """About 36 M parameters, 144 MB in float32."""
    torch.manual_seed(0)
    shape = {"vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8}
    rest = {"head_dim": 64, "intermediate_size": 1536, "tie_word_embeddings": False, "initializer_range": 0.02}
    tokens = {"max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    AutoModelForCausalLM.from_config(Qwen3Config(**shape | rest | tokens)).save_pretrained(directory)


class Versions:
    """Publishes versions of a model into a run directory; `seconds` is what the newest offer took to make."""

    def __init__(self, root: Path, model: Path) -> None:
        self.run = RunDirectory(root)
        self.run.weights.mkdir(parents=True)
        self.memory = shared_memory.memory_of(uuid.uuid4().hex)
        self.seconds = 0.0
        self._model = model
        self._newest = -1
        self._tensors = {name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()}

    @property
    def whole_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    def first(self) -> int:
        """Publish the model as it is."""
        return self._publish()

    def full(self) -> int:
        self._change(1.0)
        return self._publish()

    def delta(self, share: float) -> int:
        """A version of which about `share` of the bytes have changed, in whole layers."""
        self._change(share)
        return self._publish(self._delta)

    def in_memory(self) -> int:
        self._change(1.0)
        return self._publish(self._copy)

    def close(self) -> None:
        shared_memory.clear(self.memory)

    def _change(self, share: float) -> None:
        for name in self._chosen(share):
            self._tensors[name] = self._tensors[name] * 1.001

    def _chosen(self, share: float) -> Iterable[str]:
        due = share * self.whole_bytes
        for name in sorted(self._tensors, key=lambda name: (".layers." not in name, name)):
            if due > 0 or share >= 1:
                yield name
                due -= self._tensors[name].numel() * self._tensors[name].element_size()

    def _delta(self, version: int, staged: Path) -> dict[str, object]:
        out, base = self.run.delta(version), self.run.weight(version - 1)
        written = write_delta(base, staged, out, lineage=LINEAGE, base_version=version - 1, version=version, smaller=False)
        return {"delta": {"base": version - 1, "directory": str(out.relative_to(self.run.path)), "bytes": written.bytes}}

    def _copy(self, version: int, staged: Path) -> dict[str, object]:
        shared_memory.create(self.memory)
        copy = self.memory / self.run.weight(version).name
        shutil.copytree(staged, copy, copy_function=shutil.copyfile)
        return {"memory": {"directory": str(copy)}}

    def _publish(self, offer: Callable[[int, Path], dict[str, object]] | None = None) -> int:
        self._newest += 1
        final = self.run.weight(self._newest)
        temporary = staging(final)
        for file in self._model.glob("*.json"):
            shutil.copyfile(file, temporary / file.name)
        save_file(self._tensors, temporary / TENSORS, metadata={"format": "pt"})
        started = time.perf_counter()
        offers = offer(self._newest, temporary) if offer is not None else {}
        self.seconds = time.perf_counter() - started
        write_manifest(temporary, kind="weights", lineage=LINEAGE, id=self._newest, extra={"offers": offers})
        publish(temporary, final)
        return self._newest


def read_seconds(path: Path, *, cached: bool) -> float:
    """Read a file once, in pieces; `cached` False: after its pages were dropped, as far as the system does so for one who asks."""
    with path.open("rb", buffering=0) as file:
        if not cached:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        piece = bytearray(1 << 20)
        started = time.perf_counter()
        while file.readinto(piece):
            pass
        return time.perf_counter() - started
