"""Manifests: what makes a directory exist. A directory without a valid manifest does not.

A manifest names its format version, kind, lineage and id, and every file with size and SHA-256. It is written last, in a staging directory
that is then renamed whole (`staging` -> files -> `write_manifest` -> `publish`), so a reader that sees one sees everything.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headway.errors import StorageError
from headway.formats.bounded import decode_json, open_regular, read_bounded
from headway.formats.files import storage_errors, strict_json, sync, temporary_sibling, write_atomically

FORMAT_VERSION = 1
NAME = "manifest.json"
MAX_BYTES = 16 * 1024**2  # a hundred thousand files

Kind = Literal["batch", "weights", "trainer"]


class FileEntry(msgspec.Struct, frozen=True):
    """One file: bytes, and SHA-256 in hexadecimal."""

    size: Annotated[int, Meta(ge=0)]
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What a directory holds. `files` maps relative POSIX paths; `extra` is what else its writer said (top level in the file)."""

    format_version: int
    kind: Kind
    lineage: str
    id: Annotated[int, Meta(ge=0)]
    files: dict[str, FileEntry]
    extra: dict[str, Any] = {}


_HASHING_THREADS = 4  # hashing releases the interpreter lock; checkpoints have several shards


def _entry(path: Path) -> FileEntry:
    with open_regular(path) as file:
        return FileEntry(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def write_manifest(
    directory: Path,
    *,
    kind: Kind,
    lineage: str,
    id: int,  # noqa: A002  the word of the contract
    extra: Mapping[str, Any] = {},
) -> None:
    """Hash every file below `directory` and write its manifest there. `extra` is strict JSON and may not reuse a manifest's own keys."""
    own = {"format_version", "kind", "lineage", "id", "files", "extra"}
    if own & extra.keys():
        raise ValueError(f"extra may not hold {', '.join(sorted(own & extra.keys()))}: they are the manifest's own")
    with storage_errors(f"{directory}: cannot write the manifest"):
        paths = [path for path in sorted(directory.rglob("*")) if path.is_file() and path != directory / NAME]
        with ThreadPoolExecutor(_HASHING_THREADS) as pool:
            files = {path.relative_to(directory).as_posix(): entry for path, entry in zip(paths, pool.map(_entry, paths), strict=True)}
        head = {"format_version": FORMAT_VERSION, "kind": kind, "lineage": lineage, "id": id}
        write_atomically(directory / NAME, strict_json({**head, **extra, "files": files}))


def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest of a directory; None when it is absent, incomplete or no valid manifest: then the directory does not exist.

    Raises StorageError when it was written by a newer headway, or is no regular file or larger than any manifest: waiting would not help.
    """
    try:
        content: Any = decode_json(read_bounded(directory / NAME, MAX_BYTES))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        raise StorageError(f"{directory / NAME}: cannot be read: {error.strerror}: check the permissions and the disk") from error
    if not isinstance(content, dict):
        return None
    version = content.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise StorageError(
            f"{directory / NAME}: format version {version}, this headway reads up to {FORMAT_VERSION}: install a newer headway"
        )
    fields = {name: content.pop(name) for name in Manifest.__struct_fields__ if name != "extra" and name in content}
    try:
        manifest = msgspec.convert({**fields, "extra": content}, Manifest)
    except msgspec.ValidationError:
        return None
    return manifest if manifest.format_version == FORMAT_VERSION else None


def verify(directory: Path, manifest: Manifest) -> None:
    """Check that every file of the manifest lies inside the directory with its size and SHA-256; raises StorageError naming the file."""
    root = directory.resolve()
    for name in manifest.files:
        if not _lies_inside(root, name):
            raise StorageError(f"{directory / NAME}: names {name!r}, which lies outside its directory: do not use what wrote it")
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        for _ in pool.map(_verify_file, [directory / name for name in manifest.files], manifest.files.values()):
            pass


def _lies_inside(root: Path, name: str) -> bool:
    """Whether a name leads to a place in `root`, links followed; a name that no file can have, or a loop of links, leads nowhere."""
    try:
        return (root / name).resolve().is_relative_to(root)
    except (ValueError, RuntimeError, OSError):
        return False


def _verify_file(path: Path, expected: FileEntry) -> None:
    remedy = "the directory is damaged, remove it"
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
            raise StorageError(f"{path}: is no regular file: {remedy}")
        size = status.st_size
        if size != expected.size:
            raise StorageError(f"{path}: {size} bytes, the manifest says {expected.size}: {remedy}")
        if _entry(path) != expected:
            raise StorageError(f"{path}: SHA-256 differs from the manifest's: {remedy}")
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}: {remedy}") from error


def staging(final: Path) -> Path:
    """Create and return a directory beside `final` to fill; `publish` renames it. Nobody reads names that begin with `.tmp-`."""
    temporary = temporary_sibling(final)
    with storage_errors(f"{temporary}: cannot be created"):
        temporary.mkdir()  # and not its parent: where a mount is gone, the directory would be filled beside the disk
    return temporary


def publish(temporary: Path, final: Path) -> None:
    """Make a filled staging directory appear under its final name, whole and durable. Raises StorageError when the name is taken."""
    with storage_errors(f"{final}: cannot be published"):
        # Some libraries write files only their owner can read (safetensors: 0600); the directory's own mode says what the umask allows.
        mode = temporary.stat().st_mode & 0o666
        for path in sorted(temporary.rglob("*")):
            if path.is_file():
                path.chmod(mode)
            sync(path)
        sync(temporary)
        if final.exists():  # rename would replace an empty directory, and its own error for a full one names no remedy
            raise StorageError(
                f"{final}: exists already: it was published before, or holds another run's files; remove it or choose another run"
            )
        temporary.rename(final)
        sync(final.parent)
