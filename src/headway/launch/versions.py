"""Which version a run that is taken up again goes on from: the newest that lies in weights/ whole, written by the run's own line.

Whatever else has a version's name above it would stand in the way of the versions to come: what is damaged and what others wrote is set
aside under another name, and kept.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headway.errors import StorageError
from headway.formats.manifest import Kind, read_manifest, verify
from headway.formats.run_directory import RunDirectory, numbered, set_aside
from headway.rules.lineage import Line, belongs

Say = Callable[[str], None]
_FOREIGN = "was written for lineage"


def newest_version(run: RunDirectory, line: Line, *, with_state: bool, say: Say) -> int | None:
    """Return the newest complete version of `line`, verified; None: there is none. `say` is told of everything that is set aside.

    Raises StorageError where the disk does not let itself be read: then nothing can be said.

    `with_state`: a version without the trainer's state (`trainer/<v>`) is none: the embedded trainer could not go on from it.
    """
    for version in reversed(numbered(run.weights)):
        wrong = _wrong(run.weight(version), "weights", version, line)
        if not wrong and with_state and version > 0:
            wrong = _wrong(run.trainer_state(version), "trainer", version, line)
        if not wrong:
            return version
        for directory in (run.weight(version), run.trainer_state(version)):
            if directory.exists():
                aside = set_aside(directory, "foreign" if _FOREIGN in wrong else "damaged")
                say(f"{wrong}; {directory.parent.name}/{directory.name} is set aside as {aside}")
    return None


def completed_at(run: RunDirectory, version: int) -> float | None:
    """Return when a version became complete, in Unix seconds; None: it is not there any more, or never was written."""
    try:
        return (run.weight(version) / "manifest.json").stat().st_mtime
    except OSError:
        return None


def _wrong(directory: Path, kind: Kind, version: int, line: Line) -> str:
    """Say what keeps a directory from being this version of this line; "": nothing does."""
    manifest = read_manifest(directory)
    if manifest is None:
        return f"{directory}: has no valid manifest"
    if (manifest.kind, manifest.id) != (kind, version):
        return f"{directory}: its manifest is of {manifest.kind} {manifest.id}"
    if not belongs(manifest.lineage, version, line):
        return f"{directory}: {_FOREIGN} {manifest.lineage}, which is not this run's at version {version}"
    try:
        verify(directory, manifest)
    except StorageError as error:
        if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
            raise  # a disk that does not answer says nothing about what lies on it
        return str(error).removesuffix(": the directory is damaged, remove it")
    return ""
