"""What lies where a file should be and is none (a pipe, a socket, a device) is refused in one line, by whoever reads there, at once."""

import asyncio
import json
import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headway.adapters.engines.held import HeldCheckpoints, full_checkpoint, is_tied
from headway.adapters.exporters.jsonl import JsonlExporter
from headway.adapters.journal.segments import SegmentIndex, Segments
from headway.adapters.process_group import ProcessGroup
from headway.adapters.prompts.rows import read_rows
from headway.adapters.replay import read_groups
from headway.config.world import checkpoint_lacks
from headway.errors import HeadwayError, StorageError
from headway.formats.batch import read_batch
from headway.formats.bounded import open_descriptor, refuse_irregular, refuse_irregular_in
from headway.formats.delta import read_delta, tensor_hashes, write_delta
from headway.formats.hold import Hold, is_held
from headway.formats.manifest import publish, read_manifest, verify, write_manifest
from headway.formats.offered import SampleLimits
from headway.formats.tensor_headers import read_tensors
from headway.launch.events_log import logged_to
from headway.reports.run_files import open_run

WAITS_SECONDS = 60.0  # only who blocks for ever takes so long
LIMITS = SampleLimits(tokens=100, vocabulary=100)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(here)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.fixture(params=[make_pipe, make_socket, make_device])
def something(request):
    return request.param


def at_once(call):
    """Call it; return what it returns, or the error that it raises. Fails when it waits."""
    outcome = []

    def play():
        try:
            outcome.append(call())
        except Exception as error:  # noqa: BLE001 -- judged by the test
            outcome.append(error)

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    thread.join(WAITS_SECONDS)
    assert outcome, "it waits for somebody at the other end"
    return outcome[0]


def checkpoint(path: Path) -> Path:
    path.mkdir()
    save_file({"model.norm.weight": np.ones(3, np.float32)}, path / "model.safetensors")
    (path / "config.json").write_text('{"model_type": "qwen3"}')
    (path / "tokenizer.json").write_text("{}")
    return path


def run_directory(path: Path) -> Path:
    path.mkdir()
    head = {"id": "r", "lineage": "ab", "headway_version": "0", "engine_version": "x", "trainer_version": "x", "seed": 0, "created": 0.0}
    (path / "run.json").write_text(json.dumps({"format_version": 1, **head}))
    (path / "config.toml").write_text('[run]\nname = "a"\nsteps = 3\nstate_directory = ""\n[rollout]\n')
    return path


async def offered(directory: Path) -> None:
    held = HeldCheckpoints("engine-0", "", lambda there, _: full_checkpoint(there))
    try:
        await held.offer(directory)
    finally:
        held.close()


async def started(log: Path) -> None:
    await ProcessGroup.start("child", ("true",), log=log)


def read_in(directory: Path) -> None:
    with logged_to(directory / "events.log"):
        pass


READERS = {
    "tensors": ("model.safetensors", read_tensors),
    "hashes": ("model.safetensors", tensor_hashes),
    "a shard beside others": ("model-2.safetensors", read_tensors),
    "an engine's checkpoint": ("model.safetensors", lambda path: asyncio.run(offered(path))),
    "a base": ("model.safetensors", lambda path: write_delta(path, path, path / "out", lineage="ab", base_version=0, version=1)),
    "a delta": ("delta.json", read_delta),
    "a manifest": ("manifest.json", read_manifest),
    "a batch": ("manifest.json", read_batch),
    "what loaders read": ("tokenizer_config.json", refuse_irregular_in),
    "prompts": ("prompts.parquet", read_rows),
    "prompts by name": ("prompts.jsonl", lambda path: read_rows(path / "prompts.jsonl")),
    "groups": ("groups.jsonl", lambda path: list(read_groups(path / "groups.jsonl", LIMITS))),
    "a record": ("rollouts.parquet", lambda path: list(read_groups(path / "rollouts.parquet", LIMITS))),
    "the log for people": ("events.log", read_in),
    "the log of a child": ("child.log", lambda path: asyncio.run(started(path / "child.log"))),
    "a segment": ("000001.rollouts", lambda path: Segments(path, index=SegmentIndex())),
}


@pytest.mark.parametrize(("name", "read"), READERS.values(), ids=READERS.keys())
def test_it_is_refused_by_name_and_nobody_waits(tmp_path, something, name, read):
    directory = checkpoint(tmp_path / "here")
    (directory / name).unlink(missing_ok=True)
    something(directory / name)
    error = at_once(lambda: read(directory))
    assert isinstance(error, HeadwayError), error
    assert str(directory) in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"]
)
def test_a_model_with_such_a_file_is_none(tmp_path, something, name):
    directory = checkpoint(tmp_path / "model")
    assert checkpoint_lacks(directory) == ""
    (directory / name).unlink(missing_ok=True)
    something(directory / name)
    assert at_once(lambda: checkpoint_lacks(directory)) == f"{directory / name}: is no regular file: remove it"


def test_what_no_loader_opens_may_be_anything(tmp_path, something):
    directory = checkpoint(tmp_path / "model")
    something(directory / "control.sock")
    (directory / "more.json").mkdir()
    assert at_once(lambda: checkpoint_lacks(directory)) == ""


def test_nobody_waits_for_a_tied_head(tmp_path, something):
    something(tmp_path / "config.json")
    assert at_once(lambda: is_tied(tmp_path)) is False
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true, "limit": Infinity}')
    assert is_tied(tmp_path)


def test_a_directory_without_a_manifest_that_is_a_file_is_not_held_and_holding_it_says_nothing(tmp_path, something):
    something(tmp_path / "manifest.json")
    assert at_once(lambda: Hold(tmp_path).release()) is None
    assert at_once(lambda: is_held(tmp_path)) is False


def test_a_file_that_became_something_else_after_its_manifest_was_written_is_not_waited_for(tmp_path, something):
    directory = checkpoint(tmp_path / "weights")
    write_manifest(directory, kind="weights", lineage="ab", id=3)
    manifest = read_manifest(directory)
    assert manifest is not None
    (directory / "config.json").unlink()
    something(directory / "config.json")
    error = at_once(lambda: verify(directory, manifest))
    assert isinstance(error, StorageError)
    assert "config.json" in str(error)


def test_a_directory_that_holds_a_pipe_is_not_published_and_nobody_waits(tmp_path):
    directory = checkpoint(tmp_path / "weights")
    write_manifest(directory, kind="weights", lineage="ab", id=3)
    os.mkfifo(directory / "pipe")
    assert isinstance(at_once(lambda: publish(directory, tmp_path / "final")), StorageError)
    assert not (tmp_path / "final").exists()


@pytest.mark.parametrize("name", ["config.toml", "run.json"])
def test_a_run_with_such_a_file_is_not_opened(tmp_path, something, name):
    path = run_directory(tmp_path / "run")
    open_run(path)
    (path / name).unlink()
    something(path / name)
    error = at_once(lambda: open_run(path))
    assert isinstance(error, StorageError)
    assert f"{path / name}: is no regular file" in str(error)


def test_rows_that_such_a_file_should_hold_are_refused(tmp_path, something):
    run = open_run(run_directory(tmp_path / "run"))
    assert run.batches() == []
    something(tmp_path / "run" / "metrics.jsonl")
    error = at_once(run.batches)
    assert isinstance(error, StorageError)
    assert "metrics.jsonl: is no regular file" in str(error)


def test_rows_are_not_written_into_it(tmp_path, something, caplog):
    run = open_run(run_directory(tmp_path / "run")).directory
    something(run.metrics_jsonl)
    exporter = JsonlExporter(run)
    assert at_once(lambda: exporter.export("metrics", {"batch": 0})) is None
    assert exporter.failures == 1
    assert "metrics.jsonl: is no regular file" in caplog.text


def test_a_regular_file_is_opened_by_any_flags_and_links_lead_to_it(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    refuse_irregular(tmp_path / "link")  # it leads nowhere yet
    descriptor = open_descriptor(tmp_path / "link", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, b"one")
    os.close(descriptor)
    refuse_irregular(tmp_path / "link")
    assert (tmp_path / "file").read_bytes() == b"one"
