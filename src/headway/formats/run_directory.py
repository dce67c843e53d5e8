"""The run directory: where everything of a run lies, who owns it, and `run.json`, which says what it is.

Names of files and directories are defined here and nowhere else. One live process owns a run directory at a time (`flock` on `lock`, which
the kernel releases however the process ends); a directory belongs to one run for good.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from pathlib import Path
from typing import Any, Literal

import msgspec

from headway.errors import ConfigError, StorageError
from headway.formats.bounded import brief, decode_json, read_bounded
from headway.formats.files import TEMPORARY, remove_temporaries, storage_errors, strict_json, sync, write_atomically

RUN_INFO_VERSION = 1
MAX_RUN_INFO_BYTES = 1024**2
_OTHER_NAME = "choose another run.name or run.directory"


class Ending(msgspec.Struct, frozen=True):
    """How a run ended: exit code, cause, Unix time, and whose matter the error was (`errors.Kind`; empty: there was none)."""

    code: int
    cause: str
    time: float
    kind: str = ""


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`: what this run is. `created` is Unix time; `ended` is None while it runs, or when nobody could write it any more.

    `lineages`: the label that each lineage of the run went back to (None: the first). `resumes`: how often the run was taken up again.
    """

    id: str
    lineage: str
    headway_version: str
    engine_version: str
    trainer_version: str
    seed: int
    created: float
    ended: Ending | None = None
    parent: str | None = None  # "<lineage>-<version>" that this lineage goes back to
    lineages: dict[str, str | None] = {}
    resumes: int = 0
    format_version: int = RUN_INFO_VERSION


class RunDirectory:
    """Paths of a run, and the lock that its owner holds. Constructing one touches nothing; owners `create`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """Make a fresh run directory and own it until `close`; raises ConfigError when another run has or had it."""
        run = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not run.lock.exists():
                run.refuse_used()
            run._acquire()
            try:
                run.refuse_used()
                run._make_directories()
            except BaseException:
                run.close()
                raise
        except OSError as error:
            raise ConfigError(f"{path}: cannot be made a run directory: {error.strerror or error}: {_OTHER_NAME}") from error
        return run

    @classmethod
    def take_up(cls, path: Path) -> RunDirectory | None:
        """Own a directory that holds a run until `close`; None: it holds none, and what a failed start has left there is gone.

        Raises ConfigError while another process owns it.
        """
        run = cls(path)
        if not path.is_dir():
            return None
        try:
            run._acquire()
            try:
                remove_temporaries(path)
                if run.run_json.exists():
                    remove_temporaries(run.batches)
                    run._make_directories()
                    return run
                run.config.unlink(missing_ok=True)  # run.json is written last: without it nothing has happened yet
            except BaseException:
                run.close()
                raise
        except OSError as error:
            raise ConfigError(f"{path}: cannot be taken up: {error.strerror or error}: check the directory") from error
        run.close()
        return None

    def _make_directories(self) -> None:
        for directory in (self.batches, self.weights, self.trainer_metrics, self.logs):
            directory.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """Give up ownership; idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _acquire(self) -> None:
        descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
                raise
            raise ConfigError(f"{self.path}: in use by a live run (process {owner or 'unknown'}): wait for it, or {_OTHER_NAME}") from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._lock = descriptor

    def refuse_used(self) -> None:
        """Raise ConfigError for a directory that holds any file but the lock and temporary ones, which a failed start leaves."""
        for parent, _, files in os.walk(self.path):
            for name in files:
                if (found := Path(parent, name)) != self.lock and not name.startswith(TEMPORARY):
                    what = "holds another run" if self.run_json.exists() else f"is not empty ({found.relative_to(self.path)})"
                    remedy = f"{_OTHER_NAME}, or take it up again with --resume" if self.run_json.exists() else _OTHER_NAME
                    raise ConfigError(f"{self.path}: {what}: {remedy}")

    # ---------------------------------------------------------------------------------------------------------------- where things lie

    @property
    def lock(self) -> Path:
        """Held (`flock`) by the process that owns the run; holds its process id."""
        return self.path / "lock"

    @property
    def run_json(self) -> Path:
        """What the run is and how it ended (`RunInfo`)."""
        return self.path / "run.json"

    @property
    def config(self) -> Path:
        """The resolved config, secrets left out."""
        return self.path / "config.toml"

    @property
    def batches(self) -> Path:
        """One directory per batch."""
        return self.path / "batches"

    @property
    def weights(self) -> Path:
        """One directory per published version."""
        return self.path / "weights"

    @property
    def deltas(self) -> Path:
        """One directory per version that is offered as what has changed since another, while its weights are there."""
        return self.path / "deltas"

    @property
    def trainer(self) -> Path:
        """One directory per version: optimiser, schedule, random state."""
        return self.path / "trainer"

    @property
    def state(self) -> Path:
        """Journal and payload segments, unless run.state_directory says otherwise."""
        return self.path / "state"

    @property
    def logs(self) -> Path:
        """Output of child processes."""
        return self.path / "logs"

    @property
    def metrics_jsonl(self) -> Path:
        """One row per batch."""
        return self.path / "metrics.jsonl"

    @property
    def pipeline_jsonl(self) -> Path:
        """One row per metrics interval."""
        return self.path / "pipeline.jsonl"

    @property
    def eval_jsonl(self) -> Path:
        """One row per evaluation."""
        return self.path / "eval.jsonl"

    @property
    def events_log(self) -> Path:
        """What happened, for people."""
        return self.path / "events.log"

    @property
    def ingest_json(self) -> Path:
        """Where the run takes rollouts over HTTP, and the token for it; for the run's user only, while it runs."""
        return self.path / "ingest.json"

    @property
    def trainer_metrics(self) -> Path:
        """One JSON file per batch, by the trainer."""
        return self.trainer / "metrics"

    @property
    def trainer_lock(self) -> Path:
        """Held by headway's own trainer while it lives (`formats.hold.alone`): one at a time writes versions."""
        return self.trainer / "lock"

    def batch(self, k: int) -> Path:
        """Directory of batch `k`."""
        return self.batches / f"{k:08d}"

    def weight(self, version: int) -> Path:
        """Directory of a published version's weights."""
        return self.weights / f"{version:08d}"

    def delta(self, version: int) -> Path:
        """Directory of what has changed in a version."""
        return self.deltas / f"{version:08d}"

    def trainer_state(self, version: int) -> Path:
        """Directory of the trainer's state at a version."""
        return self.trainer / f"{version:08d}"

    def trainer_metric(self, k: int) -> Path:
        """File of what the trainer measured on batch `k`."""
        return self.trainer_metrics / f"{k:08d}.json"


def numbered(directory: Path) -> list[int]:
    """Return the numbers of the children that are named by 8 digits or more, ascending; staging and foreign names are left out.

    Raises StorageError where the disk does not say; a directory that is not there has none.
    """
    with storage_errors(f"{directory}: what lies there cannot be listed"):
        try:
            names = [child.name for child in directory.iterdir()]
        except FileNotFoundError:
            return []
    return sorted(int(name) for name in names if len(name) >= 8 and name.isascii() and name.isdigit())


def set_aside(directory: Path, why: Literal["damaged", "foreign"]) -> str:
    """Give a directory a name that nobody reads, and return it: `.damaged-<name>-<random>`, `.foreign-<name>-<random>`."""
    name = f".{why}-{directory.name}-{secrets.token_hex(2)}"
    with storage_errors(f"{directory}: cannot be set aside"):
        directory.rename(directory.with_name(name))
        sync(directory.parent)
    return name


def save_run_info(run: RunDirectory, info: RunInfo) -> None:
    """Write `run.json`, atomically."""
    with storage_errors(f"{run.run_json}: cannot be written"):
        write_atomically(run.run_json, strict_json(info))


def load_run_info(run: RunDirectory) -> RunInfo:
    """Read `run.json`; raises StorageError when it is absent, damaged or from a newer headway."""
    with storage_errors(f"{run.run_json}: cannot be read"):
        data = read_bounded(run.run_json, MAX_RUN_INFO_BYTES)
    try:
        head: dict[str, Any] = decode_json(data, dict[str, Any])
        if head.get("format_version", RUN_INFO_VERSION) > RUN_INFO_VERSION:
            raise StorageError(f"{run.run_json}: written by a newer headway ({head.get('headway_version')}): install that version")
        return msgspec.convert(head, RunInfo)
    except (msgspec.MsgspecError, TypeError) as error:
        raise StorageError(f"{run.run_json}: is damaged: {brief(error)}: restore it or start another run") from error
