"""Which way the weights of a version go to one engine: what the trainer offers, where that is exact, and otherwise the complete directory.

A delta is used only where the engine says that it serves the delta's base, was given that base here, and the hashes of all tensors that the
delta leaves out are the base's: then base and delta are the version, bit for bit, although the engine itself never looks. Everything is
checked before the engine is paused. An engine that refuses a delta, or a copy in memory, is given the directory at once, in the same sync.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from headway.adapters.engines.calls import CallRefused
from headway.errors import StorageError
from headway.formats.delta import Hashes, read_delta, refuse_other_base, tensor_hashes, verified_tensors
from headway.formats.offers import DeltaOffer, MemoryOffer
from headway.formats.tensor_headers import TensorEntry, bytes_in, read_tensors
from headway.types import Checkpoint, Transferred, TransferWay

_MEGA = 1e6

_log = logging.getLogger("headway")


class Had(NamedTuple):
    """What an engine was given last: a label, and the hashes of its tensors, or the complete directory that they can be read from."""

    label: str
    tensors: Hashes | Path


@dataclass(frozen=True, slots=True)
class Route:
    """The directory that an engine is told to load, and how many bytes of tensors lie in it."""

    way: TransferWay
    directory: str
    bytes: int
    hashes: Hashes | None = None  # of all tensors of the version, where they are known


def way_of(checkpoint: Checkpoint, wanted: TransferWay, label: str, had: Had | None) -> TransferWay:
    """Return the way that may be looked at: a delta only for an engine that says that it serves the base, and was given it here."""
    if wanted == "memory" and isinstance(checkpoint.offers.get("memory"), MemoryOffer):
        return "memory"
    offer = checkpoint.offers.get("delta")
    if wanted == "delta" and isinstance(offer, DeltaOffer) and had is not None:
        lineage = checkpoint.label.rpartition("-")[0]
        if label == had.label == f"{lineage}-{offer.base}":
            return "delta"
    return "directory"


def delta_route(checkpoint: Checkpoint, had: Had) -> Route:
    """Return the way by the delta that the checkpoint offers. Raises StorageError where it would not make the checkpoint of what is had."""
    offer: DeltaOffer = checkpoint.offers["delta"]
    directory = Path(offer.directory)
    delta = read_delta(directory)
    lineage = checkpoint.label.rpartition("-")[0]
    if delta is None:
        raise StorageError(f"{directory} holds no delta.json")
    if (delta.lineage, delta.base, delta.version) != (lineage, offer.base, checkpoint.version):
        said = f"{delta.lineage}-{delta.base} to {delta.version}"
        raise StorageError(f"{directory} leads from {said}, and not from {lineage}-{offer.base} to {checkpoint.version}")
    carried = verified_tensors(directory, delta)
    complete = read_tensors(Path(checkpoint.directory))
    if complete.keys() != delta.tensors.keys():
        raise StorageError(f"{directory} is of other tensors than {checkpoint.directory}")
    _refuse_other_headers(directory, carried, complete)
    base = tensor_hashes(had.tensors) if isinstance(had.tensors, Path) else had.tensors
    refuse_other_base(delta, base, carried)
    return Route("delta", offer.directory, bytes_in(carried.values()), delta.tensors)


def memory_route(checkpoint: Checkpoint) -> Route:
    """Return the way by the copy in memory that the checkpoint offers. Raises StorageError where it is not the checkpoint's."""
    offer: MemoryOffer = checkpoint.offers["memory"]
    copy, complete = read_tensors(Path(offer.directory)), read_tensors(Path(checkpoint.directory))
    if copy.keys() != complete.keys():
        raise StorageError(f"{offer.directory} is of other tensors than {checkpoint.directory}")
    _refuse_other_headers(Path(offer.directory), copy, complete)
    return Route("memory", offer.directory, bytes_in(copy.values()))


class Transfers:
    """The transfers to one engine, as `engine.weight_transfer` (`wanted`) asks, and what is known of the weights that it has."""

    def __init__(self, name: str, wanted: TransferWay) -> None:
        self._name = name
        self._wanted = wanted
        self._had: Had | None = None  # None: not known, or of two versions
        self._route: Route | None = None
        self._whole = 0  # bytes of the complete directory

    def may_offer(self, checkpoint: Checkpoint) -> bool:
        """Whether there is a choice, for which the engine's label is to be known."""
        return self._wanted in checkpoint.offers

    async def choose(self, checkpoint: Checkpoint, label: str) -> None:
        """Choose the way for a checkpoint to an engine that says that it serves `label`. What is offered and no good is told of.

        All that there is to read is read here: an engine that is paused is not to wait for a disk.
        """
        way = way_of(checkpoint, self._wanted, label, self._had)
        self._route = None
        self._whole = await asyncio.to_thread(bytes_of, Path(checkpoint.directory))
        try:
            if way == "delta" and self._had is not None:
                self._route = await asyncio.to_thread(delta_route, checkpoint, self._had)
            elif way == "memory":
                self._route = await asyncio.to_thread(memory_route, checkpoint)
        except StorageError as error:
            _log.warning("%s: %s is loaded from its complete directory: %s", self._name, checkpoint.label, error)

    async def bring(self, checkpoint: Checkpoint, load: Callable[[Checkpoint], Awaitable[None]]) -> Transferred:
        """Let `load` load the chosen directory; when the engine refuses that, the complete one. Raises EngineFailed, as `load` does.

        Returns what was loaded in the end.
        """
        started = time.monotonic()
        had, self._had = self._had, None
        route = self._route
        if route is not None:
            try:
                await load(replace(checkpoint, directory=route.directory))
            except CallRefused as error:
                _log.warning("%s: %s is loaded from its complete directory: %s", self._name, checkpoint.label, error)
                route = self._route = None
        if route is None:
            await load(checkpoint)
        seconds = time.monotonic() - started
        done = Transferred("directory", self._whole, seconds) if route is None else Transferred(route.way, route.bytes, seconds)
        told = f"{_how(done, had)}, {done.bytes / _MEGA:.2f} MB, in {seconds:.3f} s"
        _log.info("%s has loaded %s %s", self._name, checkpoint.label, told)
        return done

    def serves(self, checkpoint: Checkpoint) -> None:
        """The engine serves the checkpoint, whole."""
        hashes = self._route.hashes if self._route is not None else None
        self._had = Had(checkpoint.label, Path(checkpoint.directory) if hashes is None else hashes)
        self._route = None

    def forget(self) -> None:
        """Nobody knows what the engine has."""
        self._had = self._route = None


def bytes_of(directory: Path) -> int:
    """Return how many bytes of tensors lie in a directory, by their headers; 0 where it cannot be read from here."""
    try:
        return bytes_in(read_tensors(directory).values())
    except StorageError:
        return 0


def _how(done: Transferred, had: Had | None) -> str:
    if done.way == "delta" and had is not None:
        return f"by what has changed since {had.label}"
    return "from memory" if done.way == "memory" else "from its directory"


def _refuse_other_headers(directory: Path, carried: Mapping[str, TensorEntry], complete: Mapping[str, TensorEntry]) -> None:
    for name, entry in carried.items():
        if (entry.dtype, entry.shape) != (complete[name].dtype, complete[name].shape):
            raise StorageError(f"{directory}: {name} is of another type or shape than in the complete checkpoint")
