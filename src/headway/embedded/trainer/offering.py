"""What the trainer offers beside `weights/<v>`, as `engine.weight_transfer` asks: a delta from the version before, or a copy in memory.

`weights/<v>` is complete on disk whatever is offered: an engine that was started afresh, or does not serve the base, takes that. An offer
appears before the version whose manifest names it, and goes with it at the latest; what a killed trainer has left goes at the start of the
next one, and a run's place in memory at the end.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from headway.errors import StorageError
from headway.formats import shared_memory
from headway.formats.delta import Hashes, tensor_hashes, write_delta
from headway.formats.files import remove_temporaries, storage_errors, temporary_sibling
from headway.formats.hold import is_held
from headway.formats.offers import KEY
from headway.formats.run_directory import RunDirectory, numbered

KEPT_IN_MEMORY = 2  # versions: what engines take now, and what they may be taking yet
_MEGA = 1e6

_log = logging.getLogger(__name__)


class Offering:
    """The offers of one run's trainer. `way`: engine.weight_transfer; `serves`: whether engines are to be given a version.

    Only for those is anything offered, and a delta leads from one of them to the next (trainer.publish_every).
    """

    def __init__(self, run: RunDirectory, way: str, *, lineage: str, run_id: str, serves: Callable[[int], bool]) -> None:
        self._serves = serves
        self._run = run
        self._way = way
        self._lineage = lineage
        self._memory = shared_memory.memory_of(run_id)
        self._copied = False  # whether the newest version lies in memory: otherwise the place there may be somebody else's
        self._base: tuple[int, Hashes | Path] | None = None  # the version that engines were given last, by its hashes or where it lies

    @property
    def in_memory(self) -> bool:
        """Whether versions are offered in shared memory, which lasts as long as this process."""
        return self._way == "memory"

    def start(self, version: int, directory: Path | None) -> None:
        """Remove what a killed trainer has left, and go on from `version`, which lies in `directory` (None: nowhere yet)."""
        shared_memory.clear(self._memory)
        remove_temporaries(self._run.deltas)
        for later in numbered(self._run.deltas):
            if later > version:
                self._remove_delta(later)
        self._base = None if directory is None else self._given_last(version, directory)

    def offer(self, version: int, staged: Path) -> dict[str, Any]:
        """Return what the manifest of the version says of its offers; its files lie complete in `staged`.

        What cannot be offered (there is no room, or the base is gone) is told of, and does not keep the version from being published.
        Raises StorageError where `staged` cannot be read.
        """
        started = time.monotonic()
        offers: dict[str, Any] = {}
        if not self._serves(version):
            return offers
        if self._way == "delta":
            offers = self._delta(version, staged)
        elif self._way == "memory":
            offers = self._copy(version, staged)
        if offers:
            _log.info("version %d is offered as %s, made in %.2f s", version, offers, time.monotonic() - started)
            return {KEY: offers}
        return {}

    def retire(self) -> None:
        """Remove deltas whose version is gone, and all but the newest copies in memory."""
        existing = set(numbered(self._run.weights))
        for version in numbered(self._run.deltas):
            if version not in existing:
                self._remove_delta(version)
        if self._copied:
            self._clear_copies(numbered(self._memory)[:-KEPT_IN_MEMORY])

    def close(self) -> None:
        """Leave nothing in memory; idempotent."""
        shared_memory.clear(self._memory)

    def _given_last(self, version: int, directory: Path) -> tuple[int, Path]:
        """Return the version that engines have, and where it lies: `version` itself, as far as one can see from here.

        Where that is none that they are given as they run, only a run that has just been taken up gives it to them. In one that has gone on
        without its trainer they serve an older one, and hold it.
        """
        if not self._serves(version):
            for earlier in reversed(numbered(self._run.weights)):
                if earlier < version and is_held(self._run.weight(earlier)):
                    return earlier, self._run.weight(earlier)
        return version, directory

    def _delta(self, version: int, staged: Path) -> dict[str, Any]:
        base, self._base = self._base, (version, self._run.weight(version))
        if base is None:
            return {}
        out = self._run.delta(version)
        try:
            written = write_delta(base[1], staged, out, lineage=self._lineage, base_version=base[0], version=version)
        except StorageError as error:  # NoDelta; or the base was retired before this trainer, started anew, had its hashes
            _log.warning("version %d is offered complete only: %s", version, error)
            self._base = version, tensor_hashes(staged)
            return {}
        self._base = version, written.hashes
        share = f"{written.bytes / _MEGA:.1f} of {written.whole_bytes / _MEGA:.1f} MB have changed since version {base[0]}"
        if not out.exists():
            _log.info("version %d is offered complete only: %s", version, share)
            return {}
        _log.info("version %d: %s", version, share)
        return {"delta": {"base": base[0], "directory": str(out.relative_to(self._run.path)), "bytes": written.bytes}}

    def _copy(self, version: int, staged: Path) -> dict[str, Any]:
        final = self._memory / self._run.weight(version).name
        self._copied = False
        try:
            shared_memory.create(self._memory)
            try:
                _copied(staged, final)
            except StorageError:  # mostly for want of room
                self._clear_copies([before for before in numbered(self._memory) if before < version][:-1])
                _copied(staged, final)
        except StorageError as error:
            _log.warning("version %d is offered on disk only: %s", version, error)
            return {}
        self._copied = True
        return {"memory": {"directory": str(final)}}

    def _clear_copies(self, versions: Iterable[int]) -> None:
        for version in versions:
            shared_memory.clear(self._memory / self._run.weight(version).name)

    def _remove_delta(self, version: int) -> None:
        try:
            shutil.rmtree(self._run.delta(version))
        except OSError as error:
            _log.warning("%s: cannot be removed, will be tried again: %s", self._run.delta(version), error.strerror)


def _copied(staged: Path, final: Path) -> None:
    """Make a copy of the files of a directory appear as `final`, whole. Raises StorageError, and leaves nothing then."""
    temporary = temporary_sibling(final)
    try:
        with storage_errors(f"{temporary}: cannot be written"):
            temporary.mkdir()
            for file in staged.iterdir():
                shutil.copyfile(file, temporary / file.name)
            temporary.rename(final)
    except StorageError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
