"""LoRA adapters: policies of few tensors, each under a name of its own version ("<lineage>-17") beside base weights that never change.

An adapter is a directory as PEFT writes it. It is read and compared with the base model before an engine hears of it: no tensor without its
partner, no rank that differs from the stated one, none for a module that the base does not have or of another shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from headway.adapters.engines.held import ADAPTER_CONFIG, Tensors, full_checkpoint, is_adapter, known_tensors
from headway.errors import StorageError
from headway.formats.bounded import brief, decode_json, read_bounded
from headway.formats.tensor_headers import read_tensors
from headway.types import Checkpoint

ADAPTER_FILE = "adapter_model.safetensors"
KEPT_ADAPTERS = 2  # the newest; older ones are unloaded, and requests in flight keep theirs
_MOST_CONFIG_BYTES = 4 * 1024**2
_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


class _Config(msgspec.Struct, frozen=True):
    peft_type: str = "LORA"
    r: int = 0
    rank_pattern: dict[str, int] | None = None


class ModelJson(msgspec.Struct, frozen=True):
    """An entry of GET /v1/models."""

    id: str


class ModelsJson(msgspec.Struct, frozen=True):
    """The answer of GET /v1/models, as far as it is used."""

    data: list[ModelJson]


def served_models(body: bytes) -> list[str]:
    """Return the names of models and adapters in the body of GET /v1/models. Raises msgspec.MsgspecError."""
    answer: ModelsJson = decode_json(body, ModelsJson)
    return [model.id for model in answer.data]


def adapters_of(lineage: str, models: Iterable[str]) -> list[str]:
    """Return the names among `models` that are "<lineage>-<n>", the newest last."""
    found: dict[int, str] = {}
    for model in models:
        number = model.removeprefix(f"{lineage}-")
        if number != model and number.isascii() and number.isdigit() and str(int(number[:18])) == number:
            found[int(number)] = model
    return [found[number] for number in sorted(found)]


def adapter_or_base(directory: Path, model: Path | None) -> Tensors:
    """Return the tensors of an adapter that fits the model, or of the model itself (version 0). Raises StorageError."""
    if not is_adapter(directory):
        if model is not None and directory.resolve() != model.resolve():
            raise _whole(directory)
        return full_checkpoint(directory)
    rank, patterned = _rank(directory / ADAPTER_CONFIG)
    entries = read_tensors(directory)
    if left_over := sorted({entry.file.name for entry in entries.values()} - {ADAPTER_FILE}):
        raise StorageError(f"{directory} holds {left_over[0]} beside an adapter: only {ADAPTER_FILE} belongs there")
    tensors: Tensors = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    base = known_tensors(model) if model is not None else None
    if wrong := misfit(tensors, None if patterned else rank, base):
        raise StorageError(f"{directory / ADAPTER_FILE}: {wrong}: it is no adapter of this model")
    return tensors


def refuse_whole(checkpoint: Checkpoint) -> None:
    """Raise StorageError for a later version that is no adapter, also where the base model is not known: no engine would load it."""
    if checkpoint.version > 0 and not is_adapter(directory := Path(checkpoint.directory)):
        raise _whole(directory)


def _whole(directory: Path) -> StorageError:
    return StorageError(
        f'{directory} holds no {ADAPTER_CONFIG}: with engine.weight_transfer = "lora" each version but the first must be an adapter'
    )


def misfit(tensors: Tensors, rank: int | None, base: Tensors | None) -> str:
    """Name one tensor by which an adapter is none of the base, for people; empty: it fits. `rank` None: each module has its own."""
    if not tensors:
        return "it holds no tensor"
    for name, (_, shape) in tensors.items():
        stem = name.removesuffix(_DOWN).removesuffix(_UP)
        if stem == name:
            continue  # an embedding's, a whole module's, a bias: for the engine to judge
        partner = stem + (_UP if name.endswith(_DOWN) else _DOWN)
        if partner not in tensors:
            return f"{name} has no {partner.removeprefix(stem).strip('.')} beside it"
        if name.endswith(_UP):
            continue
        other = tensors[partner][1]
        if len(shape) != 2 or len(other) != 2 or shape[0] != other[1] or rank not in {None, shape[0]}:
            return f"{stem} has shapes {list(shape)} and {list(other)}, of rank {'its own' if rank is None else rank}"
        module = stem.removeprefix(_PREFIX) + ".weight"
        if base is None:
            continue
        if module not in base:
            return f"{name} is for {module}, which the model does not have"
        if base[module][1] != (other[0], shape[1]):
            return f"{stem} is for a module of {[other[0], shape[1]]}, and {module} of the model is {list(base[module][1])}"
    return ""


def _rank(path: Path) -> tuple[int, bool]:
    """Return the rank that an adapter states, and whether it states others for some modules."""
    try:
        config: _Config = decode_json(read_bounded(path, _MOST_CONFIG_BYTES), _Config)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}: check the permissions and the disk") from error
    except msgspec.MsgspecError as error:
        raise StorageError(f"{path}: cannot be read: {brief(error)}: PEFT writes it with an adapter") from error
    if config.peft_type != "LORA" or config.r < 1:
        raise StorageError(f"{path}: is of type {config.peft_type!r} and rank {config.r}: it must be a LoRA adapter")
    return config.r, bool(config.rank_pattern)
