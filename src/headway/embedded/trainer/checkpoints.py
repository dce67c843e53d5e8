"""Versions on disk: published whole, resumed exactly, removed in time.

A version v > 0 is a pair: `trainer/<v>` (optimiser moments, random state, master weights where the published ones are rounded) and
`weights/<v>` (a full Hugging Face checkpoint). The trainer directory is renamed first and the weights last, so the second rename is the
commit: a trainer directory without its weights does not exist, and the next start removes it. Version 0 has no trainer directory: its
optimiser is new. Tensors are safetensors, everything else is JSON.

A version that somebody loads or serves is not removed (`formats.hold`).
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from headway.embedded.trainer.initialise import SideFiles, with_dtype
from headway.embedded.trainer.offering import Offering
from headway.embedded.trainer.scoring import Policy
from headway.errors import StorageError
from headway.formats.files import remove_temporaries, storage_errors
from headway.formats.hold import unheld
from headway.formats.manifest import publish, read_manifest, staging, verify, write_manifest
from headway.formats.probe import Probe, write_probe
from headway.formats.run_directory import RunDirectory, numbered
from headway.formats.software import OURS

WEIGHTS_FILE = "model.safetensors"
STATE_FILE = "state.safetensors"

_log = logging.getLogger(__name__)


class Checkpoints:
    """The versions of one run, as its trainer writes and reads them. One trainer at a time."""

    def __init__(self, run: RunDirectory, offering: Offering, *, lineage: str, keep: int, keep_every: int) -> None:
        self._run = run
        self._offering = offering
        self._lineage = lineage
        self._keep = keep
        self._keep_every = keep_every

    def newest(self) -> int | None:
        """Return the newest version that exists; None: none was published.

        Never an older one because the newest is damaged: engines may serve it already, and going back is a decision (a new lineage).
        """
        existing = (version for version in reversed(numbered(self._run.weights)) if read_manifest(self._run.weight(version)) is not None)
        return next(existing, None)

    def clear_after(self, version: int) -> None:
        """Remove what a killed trainer left: staging directories, and trainer states that never got their weights."""
        for parent in (self._run.weights, self._run.trainer, self._run.trainer_metrics):
            remove_temporaries(parent)
        for later in numbered(self._run.trainer):
            if later > version:
                _remove(self._run.trainer_state(later))

    def publish_weights(self, version: int, policy: Policy, files: SideFiles) -> None:
        """Write and publish `weights/<version>` in the dtype the policy computes in: the commit of a version."""
        final = self._run.weight(version)
        temporary = staging(final)
        with storage_errors(f"{temporary}: cannot write weights"):
            for name, content in with_dtype(files, policy.dtype).items():
                (temporary / name).write_bytes(content)
            _save(_own_tensors(policy.model, policy.dtype), temporary / WEIGHTS_FILE)
        write_probe(temporary, _probe(policy))
        extra = {"software": OURS, **self._offering.offer(version, temporary)}
        write_manifest(temporary, kind="weights", lineage=self._lineage, id=version, extra=extra)
        publish(temporary, final)

    def publish_state(self, version: int, policy: Policy, optimiser: torch.optim.Optimizer) -> None:
        """Write and publish `trainer/<version>`: what it takes to train batch `version` exactly as if the process had gone on."""
        final = self._run.trainer_state(version)
        temporary = staging(final)
        with storage_errors(f"{temporary}: cannot write the trainer's state"):
            _save(_state_tensors(policy, optimiser), temporary / STATE_FILE)
        write_manifest(temporary, kind="trainer", lineage=self._lineage, id=version, extra={"batch": version - 1})
        publish(temporary, final)

    def verified_weights(self, version: int) -> Path:
        """Return `weights/<version>`; raises StorageError when a file of it is damaged."""
        return _verified(self._run.weight(version))

    def restore_state(self, version: int, policy: Policy, optimiser: torch.optim.Optimizer) -> None:
        """Load `trainer/<version>` into the optimiser, the random state and, where kept, the master weights."""
        tensors = load_file(_verified(self._run.trainer_state(version)) / STATE_FILE)
        torch.set_rng_state(tensors.pop("random.cpu"))
        if (state := tensors.pop("random.device", None)) is not None and policy.device.type == "cuda":
            torch.cuda.set_rng_state(state, policy.device)
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if (master := tensors.get(f"master.{name}")) is not None:
                    parameter.copy_(master)
                moments = {key: tensors[f"{key}.{name}"] for key in _MOMENTS if f"{key}.{name}" in tensors}
                if moments:
                    optimiser.state[parameter] = {key: value.to(policy.device) for key, value in moments.items()}

    def retire(self, newest: int) -> None:
        """Remove versions past retention, never one that somebody holds; what cannot be removed is tried again next time."""
        for parent in (self._run.weights, self._run.trainer):
            for version in numbered(parent):
                if version <= newest - self._keep and not (self._keep_every and version % self._keep_every == 0):
                    directory = parent / self._run.weight(version).name
                    with unheld(directory) as free:
                        if free:
                            _remove(directory)
        self._offering.retire()


_PROBE_TOKENS = 32  # more than a block of an engine's prefix cache: prefixes of older weights show
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def _verified(directory: Path) -> Path:
    manifest = read_manifest(directory)
    if manifest is None:
        raise StorageError(
            f"{directory}: is missing or has no valid manifest: restore it, or start a new run from an older version's weights"
        )
    verify(directory, manifest)
    return directory


def _probe(policy: Policy) -> Probe:
    """Return what the policy says comes next after a few ids that it has, the same ones each time."""
    config = policy.model.config
    longest = int(getattr(config, "max_position_embeddings", 0) or _PROBE_TOKENS + 1) - 1
    vocabulary = min(int(config.vocab_size), policy.vocabulary)  # engines know no ids of a padded embedding
    prompt = np.random.default_rng(0).integers(0, vocabulary, max(1, min(_PROBE_TOKENS, longest)))
    return Probe(tuple(prompt.tolist()), policy.next_logprobs(prompt).cpu().numpy())


def _own_tensors(model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the model's state without names that share another's storage (tied embeddings), floating point in `dtype`."""
    seen: set[int] = set()
    own: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            own[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return own


def _state_tensors(policy: Policy, optimiser: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {"random.cpu": torch.get_rng_state()}
    if policy.device.type == "cuda":
        tensors["random.device"] = torch.cuda.get_rng_state(policy.device)
    for name, parameter in policy.model.named_parameters():
        state = optimiser.state.get(parameter, {})
        tensors |= {f"{key}.{name}": state[key] for key in _MOMENTS if key in state}
        if policy.dtype != torch.float32:
            tensors[f"master.{name}"] = parameter.detach()
    return tensors


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:  # its own word for what the file system said, a full disk above all
        raise StorageError(f"{path}: cannot be written: {error}: free space on the disk or check it, then resume") from error


def _remove(directory: Path) -> None:
    """Remove a directory, its manifest first, so that what is half removed does not exist."""
    try:
        (directory / "manifest.json").unlink(missing_ok=True)
        shutil.rmtree(directory)
    except OSError as error:
        _log.warning("%s: cannot be removed, will be tried again: %s", directory, error.strerror)
