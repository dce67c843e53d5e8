"""A trainer that is met in the run directory: batches in, weights out, and nothing between but files.

The other side may be the embedded trainer, a torchrun job or another team's program; it keeps the contract by which a directory appears
whole under its name, with a manifest of this lineage. Other ways to the same weights that the manifest offers come with the checkpoint.
Looking costs one `stat` of `weights/` while nothing changes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from headway.errors import StorageError, TrainerFailed
from headway.formats.bounded import read_bounded
from headway.formats.files import storage_errors
from headway.formats.manifest import Manifest, read_manifest, verify
from headway.formats.offers import KEY, read_offers
from headway.formats.run_directory import RunDirectory, numbered
from headway.formats.software import stated
from headway.types import Checkpoint

_log = logging.getLogger("headway")

MAX_METRICS_BYTES = 4 * 1024**2
_SETTLED_SECONDS = 0.05  # two changes within one tick of the file system's clock look like one
_RESCAN_SECONDS = 1.0  # a shared file system may show a rename without a new time


class DirectoryTrainer:
    """The trainer of one lineage in a run directory; `alive` returns None while it lives, otherwise how it ended.

    `software` hears, with each version that is found, what its manifest says of who wrote it ("unknown": nothing). `each_version`: none is
    overtaken by a newer one, however fast the trainer is: who serves an older version on purpose needs that one.
    """

    def __init__(
        self,
        run: RunDirectory,
        lineage: str,
        poll_seconds: float,
        alive: Callable[[], str | None],
        *,
        software: Callable[[str], None] = lambda _: None,
        each_version: bool = False,
    ) -> None:
        self._run = run
        self._lineage = lineage
        self._poll_seconds = poll_seconds
        self._alive = alive
        self._software = software
        self._each_version = each_version
        self._warned = False

    async def submit(self, k: int) -> None:
        """Check that batch `k` lies complete in the run directory: that is the announcement."""
        manifest = read_manifest(self._run.batch(k))
        if manifest is None or manifest.lineage != self._lineage:
            raise StorageError(f"{self._run.batch(k)}: no complete batch of this lineage: it must be written before it is submitted")
        self._check_alive()

    async def checkpoint(self, after: int) -> Checkpoint:
        """Wait for and return the newest (with `each_version` the oldest) complete, verified checkpoint with a version above `after`.

        Raises TrainerFailed when the trainer has ended without one, StorageError when its files are damaged or the disk does not answer.
        """
        watch = _DirectoryWatch(self._run.weights)
        while True:
            ended = self._alive()  # asked before looking: what it published last is still found
            if watch.changed() or ended is not None:
                newer = [version for version in numbered(self._run.weights) if version > after]
                for version in newer if self._each_version else reversed(newer):
                    if (manifest := await self._complete(version)) is not None:
                        offers = self._offers(manifest)
                        return Checkpoint(version, f"{self._lineage}-{version}", str(self._run.weight(version)), offers)
            if ended is not None:
                raise TrainerFailed(ended)
            await asyncio.sleep(self._poll_seconds)

    async def metrics(self, k: int) -> Mapping[str, Any]:
        """Return what the trainer measured on batch `k`, empty when it reports nothing; NaN and infinity become None.

        Raises TrainerFailed when the file is no JSON object: it must be written whole, then renamed.
        """
        path = self._run.trainer_metric(k)
        try:
            row = json.loads(read_bounded(path, MAX_METRICS_BYTES), parse_constant=lambda _: None)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError, StorageError) as error:
            raise TrainerFailed(f"{path}: cannot be read: {error}: the trainer must write it whole, then rename it into place") from error
        if not isinstance(row, dict):
            raise TrainerFailed(f"{path}: holds no JSON object: the trainer must write one")
        return row

    def _check_alive(self) -> None:
        if (ended := self._alive()) is not None:
            raise TrainerFailed(ended)

    async def _complete(self, version: int) -> Manifest | None:
        """Return the manifest of a version of this lineage that lies there whole; raises StorageError when it is there, and damaged."""
        directory = self._run.weight(version)
        manifest = read_manifest(directory)
        if not self._is_ours(manifest, version):
            return None
        try:
            await asyncio.to_thread(verify, directory, manifest)
        except StorageError:
            if self._is_ours(read_manifest(directory), version):
                raise
            return None  # removed by the trainer's retention meanwhile
        self._software(stated(manifest.extra.get("software")))
        return manifest

    def _offers(self, manifest: Manifest) -> Mapping[str, Any]:
        """Return what the trainer offers beside the directory; what it has got wrong is left out, and told of once."""
        offers, problem = read_offers(manifest.extra.get(KEY), run=self._run.path, version=manifest.id)
        if problem and not self._warned:
            self._warned = True
            _log.warning("%s: its offers are not used, the directory is: %s", self._run.weight(manifest.id), problem)
        return offers

    def _is_ours(self, manifest: Manifest | None, version: int) -> TypeGuard[Manifest]:
        return manifest is not None and (manifest.kind, manifest.lineage, manifest.id) == ("weights", self._lineage, version)


class _DirectoryWatch:
    """Tells cheaply whether the entries of a directory may have changed since it was last asked."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen_ns = -1
        self._looked = 0.0

    def changed(self) -> bool:
        """Raises StorageError where the disk does not say."""
        with storage_errors(f"{self._directory}: cannot be looked at"):
            try:
                modified_ns = self._directory.stat().st_mtime_ns
            except FileNotFoundError:
                return False
        now = time.time()
        if modified_ns == self._seen_ns and now - modified_ns / 1e9 > _SETTLED_SECONDS and 0 <= now - self._looked < _RESCAN_SECONDS:
            return False
        self._seen_ns, self._looked = modified_ns, now
        return True
