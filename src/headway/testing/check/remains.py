"""Invariants 9 and 10: what is left of a run on the machine and on the disk."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from headway.errors import HeadwayError
from headway.events import Published
from headway.formats.files import TEMPORARY
from headway.formats.manifest import read_manifest, verify
from headway.formats.run_directory import numbered
from headway.testing.check.evidence import Evidence

GONE_SECONDS = 10.0  # children of a killed parent end by themselves within this time
_LISTENS = "0A"  # a state in /proc/net/tcp
_READY = re.compile(r"is ready: .*'url': '(http://[^']+)'")


def nothing_left(found: Evidence) -> Iterator[str]:
    """After the exit: no process, no port, no lock, and no partial file that could be taken for whole.

    A process is one of the run's when it holds a file of the run directory open (its log is there) and is no fake. A port is free when
    nobody listens where the run's own engine did, but for a process of which the system says that it knows nothing of the run: ports that
    were let go are given to others. Numbered directories are whole: every file as its manifest says; one
    without a manifest is no version, and no engine was given it, nor was it published. Staging names (.tmp-...) of headway's own are gone
    after an end in order; after a kill they lie there, and count for nothing.
    """
    yield from _processes(found)
    yield from _ports(found)
    try:
        with found.run.lock.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        pass
    except OSError:
        yield f"{found.run.lock} is still held"
    yield from _directories(found)
    if not found.was_killed and found.ended is not None:
        for parent in (found.directory, found.run.batches):
            for left in parent.glob(f"{TEMPORARY}*") if parent.is_dir() else ():
                yield f"{left} was left behind"


def _processes(found: Evidence) -> Iterator[str]:
    fakes = {os.getpid(), os.getppid()}
    for log in (*(found.engine_logs or ()), found.trainer_log or ()):
        fakes |= {int(entry["pid"]) for entry in log}
    deadline = time.monotonic() + GONE_SECONDS
    while (left := _holders(found.directory, fakes)) and time.monotonic() < deadline:
        time.sleep(0.05)  # nobody tells when another's children end
    for pid, command in left.items():
        yield f"process {pid} is still there: {command}"


def _holders(directory: Path, fakes: Collection[int]) -> dict[int, str]:
    """Return the processes that hold a file below `directory` open, by id; empty where the system does not tell (no /proc)."""
    below = str(directory.resolve()) + os.sep
    found: dict[int, str] = {}
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) in fakes:
            continue
        if any(each.startswith(below) for each in _open_files(process)):
            with suppress(OSError):  # it has ended
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    return found


def _ports(found: Evidence) -> Iterator[str]:
    if found.run.ingest_json.exists() and not found.was_killed:
        yield f"{found.run.ingest_json} was left behind"
    if not found.run.events_log.exists():
        return
    for url in dict.fromkeys(_READY.findall(found.run.events_log.read_text("utf-8", "replace"))):
        parts = urlsplit(url)
        try:
            with socket.create_connection((parts.hostname, parts.port), timeout=1.0):
                somebody = True
        except OSError:
            continue
        listeners = _listeners(parts.port or 0)
        if somebody and (not listeners or any(_knows(process, found.directory) for process in listeners)):
            yield f"somebody still listens at {url}, where this run's engine did"


def _listeners(port: int) -> list[Path]:
    """Return the processes that listen at a port, as directories of /proc; empty where the system does not tell."""
    sockets = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{inode}]")
    return [process for process in Path("/proc").glob("[0-9]*") if sockets & _open_files(process)]


def _open_files(process: Path) -> set[str]:
    try:
        return {str(each.readlink()) for each in (process / "fd").iterdir()}
    except OSError:
        return set()  # it has ended, or is another user's


def _knows(process: Path, directory: Path) -> bool:
    """Say whether a process has to do with a run directory: by its command, its environment, where it is, or a file that it holds."""
    here = re.compile(re.escape(str(directory.resolve())) + r"(?![\w.-])")  # and not runs/guess-2 for runs/guess
    try:
        said = b"\0".join((process / file).read_bytes() for file in ("cmdline", "environ")).decode("utf-8", "replace")
        return any(here.search(text) for text in (said, str((process / "cwd").readlink()), *_open_files(process)))
    except OSError:
        return False


def _directories(found: Evidence) -> Iterator[str]:
    published = {event.version for event in found.events if isinstance(event, Published)}
    whole = set()
    for version in numbered(found.run.weights):
        directory = found.run.weight(version)
        try:
            manifest = read_manifest(directory)
            if manifest is None:
                continue
            verify(directory, manifest)
            whole.add(version)
        except HeadwayError as error:
            yield f"{directory} is taken for complete, and is not: {error}"
    partial = {version for version in numbered(found.run.weights) if version not in whole}
    for version in sorted(partial & published):
        if read_manifest(found.run.weight(version)) is None:
            yield f"version {version} was published, and {found.run.weight(version)} has no manifest"
    for log in found.engine_logs or ():
        for entry in log:
            inside = Path(entry["directory"]).is_relative_to(found.run.weights) if entry["what"] == "loaded" else False
            if inside and not entry["whole"]:
                yield f"an engine was given {entry['directory']} before it had a manifest"
    _ = found.batches  # reads them, and reports what is not whole


def strict_json(found: Evidence) -> Iterator[str]:
    """Every line of every JSONL file parses as strict JSON, and so does every JSON file: no NaN, no Infinity, no key twice, no half line.

    After a kill the last line of a file may be cut; a process that takes the run up again cuts it away or completes the line.
    """
    for path in sorted(found.directory.glob("*.jsonl")):
        *lines, rest = path.read_bytes().split(b"\n")
        if rest and not found.was_killed:
            yield f"{path}: its last line has no end"
        for number, line in enumerate(lines, 1):
            if problem := _not_json(line):
                yield f"{path}: line {number}: {problem}"
    files = [found.run.run_json, *sorted(found.run.trainer_metrics.glob("*.json"))]
    for path in files:
        if path.exists() and (problem := _not_json(path.read_bytes())):
            yield f"{path}: {problem}"
    for batch in found.batches.values():
        for row in batch.rows:
            if problem := _not_json(str(row["metadata"]).encode()):
                yield f"batch {batch.k}: the metadata of rollout {row['rollout_id']}: {problem}"


def _not_json(data: bytes) -> str:
    try:
        json.loads(data.decode("utf-8"), parse_constant=_refuse, object_pairs_hook=_once)
    except ValueError as error:
        return f"no strict JSON: {error}"
    return ""


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found
