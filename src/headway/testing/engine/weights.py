"""The weights of the fake engine: which it says it serves, which it really has, what it does while they change, what it has cached.

What is served (`label`) and what was loaded (`loaded`, by the manifest of the directory, or by the tensor that says so) are kept apart, so
that a label that lies is found out. A pause closes one gate or two: `admits` for requests that wait, `decodes` for those that run.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

from headway.formats.manifest import read_manifest
from headway.testing.model import version_in

PauseMode = Literal["abort", "wait", "keep", "stale"]


class LoadFailed(Exception):
    """The directory holds no weights that can be loaded."""


class Weights:
    """What an engine serves. `loaded` None: the weights it was started with."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.loaded: int | None = None
        self.pause: PauseMode | None = None
        self.loads = 0
        self.admits = asyncio.Event()
        self.decodes = asyncio.Event()
        self.admits.set()
        self.decodes.set()
        self._cache: dict[tuple[str, tuple[int, ...]], int] = {}

    def close_gates(self, mode: PauseMode) -> None:
        """Pause: nothing new starts; with keep and stale nothing goes on."""
        self.pause = mode
        self.admits.clear()
        if mode in {"keep", "stale"}:
            self.decodes.clear()

    def open_gates(self) -> None:
        """Resume."""
        self.pause = None
        self.admits.set()
        self.decodes.set()

    def load(self, directory: str) -> tuple[int, bool]:
        """Take the weights of a directory; return the version they are, and whether a manifest says so.

        Raises LoadFailed, and keeps what it had.
        """
        path = Path(directory)
        try:
            manifest = read_manifest(path)
            found = version_in(path) if manifest is None else manifest.id
            if not any(path.glob("*.safetensors")):
                raise LoadFailed(f"{directory}: no *.safetensors")
        except (OSError, ValueError) as error:
            raise LoadFailed(f"{directory}: {error}") from error
        self.loaded = found
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
