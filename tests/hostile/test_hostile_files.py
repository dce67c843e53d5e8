"""Files that other programs write: manifests, run.json, metrics, batches, events, prompts. Read whole and strictly, or refused by name."""

import asyncio
import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import NESTED, damaged, ended, hostile_json, is_one_short_line
from rollout_strategies import batch_of, plain_sample, rollout_of

from headway.adapters.prompts import open_source
from headway.adapters.prompts import rows as prompt_rows
from headway.adapters.replay import ReplayFiles
from headway.adapters.trainers.directory import MAX_METRICS_BYTES, DirectoryTrainer
from headway.errors import ConfigError, HeadwayError, StorageError, TrainerFailed
from headway.events import AnyEvent, Finished, GroupDropped, Ingested, RolloutDropped
from headway.formats import manifest as manifests
from headway.formats.batch import TENSORS, TrainerBatch, assemble, read_batch, write_batch
from headway.formats.bounded import decode_json, read_bounded
from headway.formats.events import decode_event, encode_event
from headway.formats.manifest import NAME, Manifest, read_manifest, verify, write_manifest
from headway.formats.offered import SampleLimits
from headway.formats.run_directory import MAX_RUN_INFO_BYTES, RunDirectory, RunInfo, load_run_info
from headway.settings import PromptsSection

UNUSUAL = "a\u2028b\u0085c\x0b\x0c\x00\U0001f600\u2029é"


# ------------------------------------------------------------------------------------------------------------------------- manifests


def manifest_of(directory):
    """Return its manifest: there is one."""
    manifest = read_manifest(directory)
    assert manifest is not None
    return manifest


def versions(tmp_path, files):
    """A directory of weights whose manifest names `files`, whatever they are."""
    directory = tmp_path / "weights" / "00000003"
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"tensor")
    write_manifest(directory, kind="weights", lineage="run", id=3)
    told = json.loads((directory / NAME).read_bytes())
    told["files"] = files
    (directory / NAME).write_text(json.dumps(told))
    return directory


OUTSIDE = [
    "../secret",
    "/etc/passwd",
    "a/../../secret",
    "link/secret",
    "loop/x",
    "",
    ".",
    "..",
    "\x00",
    "a" * 5000,
    "model.safetensors/../../secret",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_the_names_in_a_manifest_cannot_leave_its_directory(tmp_path, name):
    directory = versions(tmp_path, {name: {"size": 6, "sha256": "0" * 64}})
    (tmp_path / "weights" / "secret").write_bytes(b"secret")
    (directory / "link").symlink_to(tmp_path / "weights")
    (directory / "loop").symlink_to(directory / "loop")
    with pytest.raises(StorageError) as refused:
        verify(directory, manifest_of(directory))
    assert str(directory) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_link_that_leads_out_of_its_directory_is_refused_even_with_the_right_content(tmp_path):
    directory = versions(tmp_path, {})
    (tmp_path / "elsewhere").write_bytes(b"tensor")
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    write_manifest(directory, kind="weights", lineage="run", id=3)
    with pytest.raises(StorageError, match="lies outside its directory"):
        verify(directory, manifest_of(directory))


def test_a_pipe_is_not_waited_for(tmp_path):
    directory = versions(tmp_path, {"pipe": {"size": 0, "sha256": "0" * 64}})
    os.mkfifo(directory / "pipe")
    with pytest.raises(StorageError, match="no regular file"):
        verify(directory, manifest_of(directory))
    (directory / NAME).unlink()
    os.mkfifo(directory / NAME)
    with pytest.raises(StorageError, match="no regular file"):
        read_manifest(directory)
    (directory / NAME).unlink()
    (directory / NAME).symlink_to("/dev/zero")
    with pytest.raises(StorageError, match="no regular file"):
        read_manifest(directory)


def test_a_manifest_without_end_is_refused(tmp_path):
    directory = versions(tmp_path, {})
    with (directory / NAME).open("r+b") as file:
        file.truncate(manifests.MAX_BYTES + 1)
    with pytest.raises(StorageError, match="more than"):
        read_manifest(directory)


MANIFEST = {
    "format_version": 1,
    "kind": "weights",
    "lineage": "run",
    "id": 3,
    "files": {"model.safetensors": {"size": 6, "sha256": "ab" * 32}},
    "step": 3,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("place")


@settings(max_examples=150, deadline=None)
@given(data=hostile_json(MANIFEST))
def test_any_manifest_is_one_or_there_is_none(place, data):
    (place / NAME).write_bytes(data)
    manifest = ended(read_manifest, place)
    if isinstance(manifest, HeadwayError):
        assert is_one_short_line(manifest, longest=1500)
    elif manifest is not None:
        assert isinstance(manifest, Manifest)
        assert manifest.format_version == 1
        assert manifest.id >= 0
        refused = ended(verify, place, manifest)
        assert isinstance(refused, StorageError) or manifest.files == {}


# ---------------------------------------------------------------------------------------------------------------------------- run.json

RUN = msgspec.to_builtins(RunInfo(id="a", lineage="run", headway_version="1", engine_version="1", trainer_version="1", seed=0, created=1.0))


@settings(max_examples=100, deadline=None)
@given(data=hostile_json(RUN))
def test_any_run_json_is_read_or_refused_by_name(place, data):
    run = RunDirectory(place)
    run.run_json.write_bytes(data)
    info = ended(load_run_info, run)
    assert isinstance(info, RunInfo) or is_one_short_line(info, longest=1500)


def test_a_run_json_without_end_or_without_rights_is_refused_by_name(tmp_path):
    run = RunDirectory(tmp_path)
    with pytest.raises(StorageError, match=r"run\.json"):
        load_run_info(run)
    run.run_json.write_bytes(b" " * (MAX_RUN_INFO_BYTES + 1))
    with pytest.raises(StorageError, match="more than"):
        load_run_info(run)


# ----------------------------------------------------------------------------------------------------------------- the trainer's metrics


@settings(max_examples=80, deadline=None)
@given(data=hostile_json({"loss": 0.5, "tokens": 17, "nested": {"a": [1, 2]}}))
def test_any_metrics_of_a_trainer_are_an_object_or_refused_by_name(place, data):
    run = RunDirectory(place)
    run.trainer_metrics.mkdir(parents=True, exist_ok=True)
    run.trainer_metric(3).write_bytes(data)
    trainer = DirectoryTrainer(run, "run", 0.01, lambda: None)
    row = ended(asyncio.run, trainer.metrics(3))
    assert isinstance(row, dict) or (isinstance(row, TrainerFailed) and is_one_short_line(row))


async def test_metrics_without_end_are_refused_and_infinite_ones_are_null(tmp_path):
    run = RunDirectory(tmp_path)
    run.trainer_metrics.mkdir(parents=True)
    trainer = DirectoryTrainer(run, "run", 0.01, lambda: None)
    run.trainer_metric(1).write_text('{"loss": NaN, "norm": -Infinity}')
    assert await trainer.metrics(1) == {"loss": None, "norm": None}
    run.trainer_metric(2).write_bytes(b" " * (MAX_METRICS_BYTES + 1))
    with pytest.raises(TrainerFailed, match="more than"):
        await trainer.metrics(2)


# --------------------------------------------------------------------------------------------------------------------------- batches


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    run = RunDirectory(tmp_path_factory.mktemp("batch"))
    run.batches.mkdir()
    rollouts = [rollout_of([plain_sample([2] * 4)], group=0, member=n) for n in range(2)]
    write_batch(run, assemble(batch_of([rollouts], k=2, max_staleness=4)), "run")
    return run.batch(2)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_batch_directory_is_whole_or_refused_by_name(batch, place, data):
    copy = place / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(batch, copy)
    what = data.draw(st.sampled_from(["manifest", "tensors", "tensors, told", "neither named"]))
    told = json.loads((copy / NAME).read_bytes())
    if what == "manifest":
        (copy / NAME).write_bytes(data.draw(hostile_json(told)))
    elif what == "neither named":
        told["files"] = {}
        (copy / NAME).write_text(json.dumps(told))
    else:
        tensors = (copy / TENSORS).read_bytes()
        (copy / TENSORS).write_bytes(data.draw(damaged(tensors).filter(lambda changed: changed != tensors)))
        if what == "tensors, told":
            extra = {name: value for name, value in told.items() if name not in {"format_version", "kind", "lineage", "id", "files"}}
            (copy / NAME).unlink()
            write_manifest(copy, kind="batch", lineage="run", id=2, extra=extra)
    read = ended(read_batch, copy)
    if isinstance(read, TrainerBatch):
        assert what in {"manifest", "tensors, told"}
        assert read.k == 2 or what == "manifest"
        assert read.token_ids.min() >= 0
        assert set(read.loss_mask.tolist()) <= {0, 1}
    else:
        assert is_one_short_line(read, longest=1500)


# ---------------------------------------------------------------------------------------------------------------------------- events

EVENTS: list[AnyEvent] = [
    Finished(1.0, 1, 2, 1, 0.5, 10, 8, 3, 4, environment=UNUSUAL),
    RolloutDropped(1.0, 1, 2, 1, "engine_error", UNUSUAL, 4, final=False),
    GroupDropped(1.0, 1, "stale", "x", 3),
    Ingested(1.0, 1, UNUSUAL, "external", 2, 3),
]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(EVENTS).flatmap(lambda event: hostile_json(json.loads(encode_event(event)))))
def test_any_line_of_the_journal_is_an_event_or_refused_by_name(line):
    event = ended(decode_event, line)
    if isinstance(event, HeadwayError):
        assert isinstance(event, StorageError)
        assert is_one_short_line(event)
    else:
        assert decode_event(encode_event(event)) == event


@pytest.mark.parametrize("event", EVENTS)
def test_N08_separators_inside_texts_end_no_line_and_come_back_as_written(event):
    line = encode_event(event)
    assert b"\n" not in line
    assert decode_event(line) == event


# ------------------------------------------------------------------------------------------------------------------ prompts and replays


def test_N08_rows_with_separators_inside_come_back_as_written(tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [{"id": str(n), "prompt": f"{UNUSUAL}{n}"} for n in range(3)]
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8", newline="\n")
    assert list(prompt_rows.read_rows(file)) == rows


@settings(max_examples=60, deadline=None)
@given(data=hostile_json({"id": "a", "prompt": "x", "answer": [1, {"b": None}]}))
def test_any_row_is_a_prompt_or_refused_by_name(place, data):
    file = place / "prompts.jsonl"
    file.write_bytes(data)
    source = ended(open_source, PromptsSection(source="prompts.jsonl"), place, 0)
    if isinstance(source, HeadwayError):
        assert isinstance(source, ConfigError)
        assert is_one_short_line(source, longest=1500)


def test_a_row_or_a_group_without_end_is_refused(tmp_path, monkeypatch):
    (tmp_path / "endless.jsonl").symlink_to("/dev/zero")
    monkeypatch.setattr(prompt_rows, "MAX_ROW_BYTES", 1 << 20)
    with pytest.raises(ConfigError, match=r"holds no prompts|more than"):
        prompt_rows.read_rows(tmp_path / "endless.jsonl")
    (tmp_path / "long.jsonl").write_bytes(b'{"a": "' + b"x" * (1 << 20) + b'"}')
    with pytest.raises(ConfigError, match=r"long\.jsonl:1: a row has more than"):
        prompt_rows.read_rows(tmp_path / "long.jsonl")
    monkeypatch.setattr("headway.adapters.replay.MAX_LINE_BYTES", 1 << 20)
    with pytest.raises(StorageError, match=r"long\.jsonl:1: a group has more than"):
        asyncio.run(_first(ReplayFiles([tmp_path / "long.jsonl"], epochs=1, limits=SampleLimits())))


async def _first(groups):
    return await anext(aiter(groups))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_parquet_file_replays_groups_or_is_refused_by_name(batch, place, data):
    file = place / "rollouts.parquet"
    (place / NAME).unlink(missing_ok=True)
    file.write_bytes(data.draw(damaged((batch / "rollouts.parquet").read_bytes())))
    group = ended(asyncio.run, _first(ReplayFiles([file], epochs=1, limits=SampleLimits())))
    if isinstance(group, HeadwayError):
        assert isinstance(group, StorageError)


# ----------------------------------------------------------------------------------------------------------------------- the tools


def test_bounded_reading_refuses_what_is_no_small_file(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bounded(tmp_path / "file", 5) == b"12345"
    for wrong in (tmp_path, Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(StorageError, match="no regular file"):
            read_bounded(wrong, 5)
    with pytest.raises(StorageError, match="more than 4 bytes"):
        read_bounded(tmp_path / "file", 4)
    with pytest.raises(FileNotFoundError):
        read_bounded(tmp_path / "absent", 4)


@pytest.mark.parametrize("wrong", [b"", b"NaN", b'{"a": Infinity}', NESTED.encode(), b"\xff", b'{"a": 1} 2', b"'a'"])
def test_json_that_is_not_strict_is_refused(wrong):
    with pytest.raises(msgspec.DecodeError):
        decode_json(wrong)
