"""The weights of the fake engine: which it says it serves, which it really has, what it does while they change, what it has cached.

What is served (`label`) and what was loaded (`loaded`, by the manifest of the directory, or by the tensor that says so) are kept apart, so
that a label that lies is found out. A pause closes one gate or two: `admits` for requests that wait, `decodes` for those that run.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

from headway.formats.manifest import read_manifest
from headway.testing.engine.tensors import Tensors, delta_of, mark_of, number_of, probe_of, tensors_of

PauseMode = Literal["abort", "wait", "keep", "stale"]
MIXED = -2
"""`loaded` of an engine that has tensors of two versions."""


class LoadFailed(Exception):
    """The directory holds no weights that can be loaded."""


class Weights:
    """What an engine serves. `loaded` None: the weights it was started with; `model`: their directory, empty: it is not known."""

    def __init__(self, label: str, model: str = "") -> None:
        self.first_label, self.model = label, model
        self.label = label
        self.loaded: int | None = None
        self.tensors: Tensors = {}
        self.mark = mark_of({})
        self.probe: tuple[list[int], list[float]] | None = None
        self.pause: PauseMode | None = None
        self.asleep = False
        self.loads = 0
        self.recomputations = 0
        self.admits = asyncio.Event()
        self.decodes = asyncio.Event()
        self._cache: dict[tuple[str, tuple[int, ...]], int] = {}
        self.restart()

    def restart(self) -> None:
        """Have what a server has that was started afresh."""
        self.label, self.loaded = self.first_label, None
        self.tensors = tensors_of(Path(self.model)) if self.model else {}
        self.probe = probe_of(Path(self.model)) if self.model else None
        self.mark = mark_of(self.tensors)
        self.asleep = False
        self.open_gates()
        self.clear_cache()

    def close_gates(self, mode: PauseMode) -> None:
        """Pause: nothing new starts; with keep and stale nothing goes on."""
        self.pause = mode
        self.admits.clear()
        if mode in {"keep", "stale"}:
            self.decodes.clear()

    def open_gates(self) -> None:
        """Resume; who is asleep stays so."""
        self.pause = None
        if not self.asleep:
            self.admits.set()
            self.decodes.set()

    def sleep(self, *, keeps: bool) -> None:
        """Give the memory away: nothing runs until `wake`. `keeps`: the weights come back with it."""
        self.asleep = True
        self.admits.clear()
        self.decodes.clear()
        self.clear_cache()
        if not keeps:
            self.loaded, self.mark, self.probe = MIXED, "gone", None

    def wake(self) -> None:
        """Take the memory again."""
        self.asleep = False
        if self.pause is None:
            self.open_gates()

    def load(self, directory: str) -> tuple[int, bool]:
        """Take the weights of a directory; return the version they are, and whether a manifest says so.

        As vLLM does: a directory with some of the tensors only is taken, in silence, and leaves a mixture (`MIXED`, unless its delta.json
        says what must have come out, and it did). Raises LoadFailed, and keeps what it had.
        """
        path = Path(directory)
        try:
            manifest = read_manifest(path)
            fresh, delta = tensors_of(path), delta_of(path)
            for name, tensor in fresh.items():
                known = self.tensors.get(name)
                if self.tensors and (known is None or known[:2] != tensor[:2]):
                    raise LoadFailed(f"{directory}: tensor {name} is {tensor[:2]}, and the model's {known and known[:2]}")
            tensors = {**self.tensors, **fresh}
            found = number_of(path) if manifest is None else manifest.id
            if delta is not None:
                exact = delta["tensors"] == {name: tensor.digest for name, tensor in tensors.items()}
                found = int(delta["version"]) if exact else MIXED
            elif tensors.keys() != fresh.keys():
                found = MIXED
            if found is None:
                raise LoadFailed(f"{directory}: no tensor says which version this is")
            probe = None if found == MIXED else probe_of(path)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise LoadFailed(f"{directory}: {error}") from error
        self.loaded, self.tensors, self.mark, self.probe = found, tensors, mark_of(tensors), probe
        self.loads += 1
        return found, manifest is not None

    def cached(self, salt: str, prompt: list[int], block: int) -> tuple[int, int]:
        """Look a prompt up in the prefix cache and fill it: return blocks hit, and those of them that other weights had filled."""
        hits = stale = 0
        for end in range(block, len(prompt) + 1, block):
            key = salt, tuple(prompt[:end])
            filled = self._cache.get(key)
            if filled is None:
                self._cache[key] = self.loads
            else:
                hits += 1
                stale += filled != self.loads
        return hits, stale

    def clear_cache(self) -> None:
        """Forget all prefixes."""
        self._cache.clear()

    def recompute(self) -> None:
        """Forget the contexts of what runs: they are computed anew when it goes on."""
        self.recomputations += 1
