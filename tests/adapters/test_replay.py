"""Replay: a batch's record gives back what was trained on, whole and marked; what is damaged is an error that names its file."""

import json
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_rollouts import small_batch, small_rollout

from headway.adapters.replay import ReplayFiles, find_files, read_groups
from headway.errors import ConfigError, StorageError
from headway.formats.batch import RECORDS, TENSORS, assemble, write_batch
from headway.formats.offered import UNPLACED, SampleLimits
from headway.formats.parquet import record_table, write_records
from headway.formats.rollout import UNKNOWN_VERSION, decode_samples, encode_samples
from headway.formats.run_directory import RunDirectory

NO_LIMITS = SampleLimits()


def write(path: Path, batch) -> Path:
    assembled = assemble(batch)
    write_records(path, assembled.records, assembled.trained, assembled.drop_causes)
    return path


def write_changed(path: Path, change) -> Path:
    """Write the record of a small batch after `change` has had its table."""
    assembled = assemble(small_batch())
    table = record_table(assembled.records, assembled.trained, assembled.drop_causes)
    changed = change(table)
    pq.write_table(changed.replace_schema_metadata(changed.schema.metadata or table.schema.metadata), path)
    return path


def with_column(name, values):
    return lambda table: table.set_column(table.schema.get_field_index(name), name, values)


def line(name="posted", rewards=(0.0, 1.0)):
    sample = {"token_ids": [1, 2], "sampled_mask": [False, True], "logprobs": [0.0, -1.0]}
    return json.dumps({"name": name, "rollouts": [{"reward": reward, "samples": [sample]} for reward in rewards]})


def rich_batch():
    """Two groups, of which one has a rollout with two samples, named rewards, metadata and another policy."""
    batch = small_batch(5, version=4)
    (first, second), other = batch.groups[0].rollouts, batch.groups[1]
    samples = [*decode_samples(first.payload), *decode_samples(small_rollout(7, version=3, tokens=9).payload)]
    rich = msgspec.structs.replace(
        first,
        payload=encode_samples(samples),
        samples=2,
        tokens=15,
        sampled_tokens=11,
        head=3,
        rewards={"style": 0.25, "truth": -1.0},
        metadata={"answer": [4, None]},
        finish="length",
        turns=3,
    )
    groups = (replace(batch.groups[0], rollouts=(rich, second)), other)
    return replace(batch, groups=groups)


def test_what_a_batch_recorded_comes_back_whole_and_marked_as_replayed(tmp_path):
    batch = rich_batch()
    groups = list(read_groups(write(tmp_path / RECORDS, batch), NO_LIMITS))
    assert [(group.name, group.source) for group in groups] == [("prompt-0", "replay"), ("prompt-1", "replay")]
    for replayed, ready in zip(groups, batch.groups, strict=True):
        for now, before in zip(replayed.rollouts, ready.rollouts, strict=True):
            marks = {"group": UNPLACED, "attempt": 0, "source": "replay", "head": -1, "tail": -1}
            assert now == msgspec.structs.replace(before, **marks, payload=now.payload)
            for sample, earlier in zip(decode_samples(now.payload), decode_samples(before.payload), strict=True):
                for name in ("token_ids", "sampled_mask", "loss_mask", "logprobs"):
                    assert getattr(sample, name).tolist() == getattr(earlier, name).tolist()
                assert sample.span_version.tolist() == [UNKNOWN_VERSION]
                assert sample.policy_id == earlier.policy_id


def test_what_was_replayed_once_can_be_replayed_again(tmp_path):
    first = list(read_groups(write(tmp_path / "first.parquet", small_batch()), NO_LIMITS))
    batch = small_batch(9)
    groups = tuple(
        replace(ready, rollouts=tuple(msgspec.structs.replace(one, group=ready.admission.group) for one in group.rollouts))
        for ready, group in zip(batch.groups, first, strict=True)
    )
    again = list(read_groups(write(tmp_path / "second.parquet", replace(batch, groups=groups)), NO_LIMITS))
    assert again == first


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_group_with_a_rollout_that_has_no_finite_reward_is_left_out_and_the_log_says_so(tmp_path, caplog, reward):
    path = write_changed(tmp_path / RECORDS, with_column("reward", pa.array([0.0, 1.0, reward, 1.0], pa.float64())))
    with caplog.at_level(logging.WARNING, "headway"):
        assert [group.name for group in read_groups(path, NO_LIMITS)] == ["prompt-0"]
    assert "1 of 2 groups are not replayed" in caplog.text
    assert str(path) in caplog.text


def test_rows_are_grouped_by_their_group_wherever_they_stand(tmp_path):
    path = write_changed(tmp_path / RECORDS, lambda table: table.take([3, 0, 2, 1]))
    groups = list(read_groups(path, NO_LIMITS))
    assert [group.name for group in groups] == ["prompt-1", "prompt-0"]
    assert [[one.reward for one in group.rollouts] for group in groups] == [[0.0, 1.0]] * 2
    assert [[one.member for one in group.rollouts] for group in groups] == [[0, 1]] * 2


def _null_token(table):
    samples = table.column("samples").to_pylist()
    samples[1][0]["token_ids"][0] = None
    return with_column("samples", pa.array(samples, table.schema.field("samples").type))(table)


def _short_logprobs(table):
    samples = table.column("samples").to_pylist()
    samples[3][0]["logprobs"].pop()
    return with_column("samples", pa.array(samples, table.schema.field("samples").type))(table)


def _none(table):
    return with_column("samples", pa.array([None] * 4, table.schema.field("samples").type))(table)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda table: table.drop_columns(["samples"]), "it has no column samples"),
        (lambda table: table.drop_columns(["reward"]), "it has no column reward"),
        (lambda table: table.replace_schema_metadata({"headway.rollout_schema": "2"}), "newer headway (schema version 2)"),
        (lambda table: table.replace_schema_metadata({"headway.rollout_schema": "x"}), "cannot be read as the record"),
        (lambda table: table.replace_schema_metadata({"other": "x"}), "no record of a batch"),
        (with_column("finish", pa.array(["bored"] * 4)), "cannot be read as the record"),
        (with_column("turns", pa.array([-1] * 4)), "cannot be read as the record"),
        (with_column("prompt_id", pa.array([None] * 4, pa.string())), "cannot be read as the record"),
        (with_column("metadata", pa.array(["{", "{}", "{}", "{}"])), "group 0 cannot be replayed"),
        (with_column("samples", pa.array([[1]] * 4)), "group 0 cannot be replayed"),
        (_none, "group 0 cannot be replayed"),
        (_null_token, "group 0 cannot be replayed"),
        (_short_logprobs, "group 1 cannot be replayed: rollouts[1].samples[0].logprobs has 5 entries"),
    ],
)
def test_a_damaged_record_is_an_error_that_names_the_file(tmp_path, change, what):
    path = write_changed(tmp_path / RECORDS, change)
    with pytest.raises(StorageError) as error:
        list(read_groups(path, NO_LIMITS))
    assert str(error.value).startswith(f"{path}: ")
    assert what in str(error.value)


@pytest.mark.parametrize("data", [b"", b"PAR1", b"not a table at all, and long enough to be one"])
def test_what_is_no_parquet_file_is_an_error_that_names_it(tmp_path, data):
    path = tmp_path / RECORDS
    path.write_bytes(data)
    with pytest.raises(StorageError, match=r"rollouts\.parquet: cannot be read as the record of a batch"):
        list(read_groups(path, NO_LIMITS))


def test_a_record_that_was_cut_or_flipped_anywhere_gives_an_error_or_sane_groups(tmp_path):
    whole = write(tmp_path / RECORDS, small_batch()).read_bytes()
    draw = np.random.default_rng(0)
    path = tmp_path / "damaged.parquet"
    refused = 0
    for _ in range(60):
        data = bytearray(whole)
        data[int(draw.integers(len(data)))] ^= 1 << int(draw.integers(8))
        path.write_bytes(data if draw.random() < 0.7 else data[: int(draw.integers(len(data)))])
        try:
            groups = list(read_groups(path, NO_LIMITS))
        except StorageError as error:
            assert str(path) in str(error)  # noqa: PT017 -- either is right
            refused += 1
        else:
            assert all(decode_samples(one.payload) for group in groups for one in group.rollouts)
    assert refused >= 20


def test_a_record_that_is_not_what_its_manifest_says_is_an_error(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    write_batch(run, assemble(small_batch(2)), "ab12")
    run.close()
    path = run.batch(2) / RECORDS
    (run.batch(2) / TENSORS).unlink()  # kept for its record only
    assert len(list(read_groups(path, NO_LIMITS))) == 2
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError, match=r"rollouts\.parquet: SHA-256 differs from the manifest's"):
        list(read_groups(path, NO_LIMITS))


def test_samples_that_the_model_cannot_take_are_an_error_that_names_the_group(tmp_path):
    path = write(tmp_path / RECORDS, small_batch())
    with pytest.raises(
        StorageError, match=r"group 0 cannot be replayed: .*token_ids holds 6 tokens: this run trains on samples of at most 5"
    ):
        list(read_groups(path, SampleLimits(tokens=5)))
    with pytest.raises(StorageError, match=r"group 1 cannot be replayed: .*token_ids holds 6: the model's ids are 0 to 5"):
        list(read_groups(path, SampleLimits(vocabulary=6)))


def test_a_file_that_is_gone_is_an_error_that_names_it(tmp_path):
    for name in ("a.jsonl", "a.parquet"):
        with pytest.raises(StorageError, match=name.replace(".", r"\.")):
            list(read_groups(tmp_path / name, NO_LIMITS))


def test_a_jsonl_file_holds_a_group_per_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{line('a')}\n\n{line('b', (0.5,))}")
    groups = list(read_groups(path, NO_LIMITS))
    assert [(group.name, group.source, len(group.rollouts)) for group in groups] == [("a", "replay", 2), ("b", "replay", 1)]


@pytest.mark.parametrize("bad", ["{", "[]", line(rewards=()), '{"name": "a"}'])
def test_a_bad_line_is_an_error_with_its_number(tmp_path, bad):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{line()}\n{bad}\n")
    groups = read_groups(path, NO_LIMITS)
    assert next(groups).name == "posted"
    with pytest.raises(StorageError, match=r"a\.jsonl:2: no group that could be replayed: "):
        next(groups)


async def names(files, **more):
    return [group.name async for group in ReplayFiles(files, limits=NO_LIMITS, **more)]


async def test_files_are_read_in_order_as_often_as_asked(tmp_path):
    (tmp_path / "a.jsonl").write_text(f"{line('a')}\n{line('b')}\n")
    files = [tmp_path / "a.jsonl", write(tmp_path / RECORDS, small_batch())]
    assert await names(files, epochs=2) == ["a", "b", "prompt-0", "prompt-1"] * 2
    endless = aiter(ReplayFiles(files, epochs=0, limits=NO_LIMITS))
    assert [(await anext(endless)).name for _ in range(9)] == ["a", "b", "prompt-0", "prompt-1"] * 2 + ["a"]
    assert isinstance(endless, AsyncGenerator)  # so that it can be closed before its end
    await endless.aclose()


@pytest.mark.parametrize("epochs", [0, 1])
async def test_files_without_a_group_are_an_error_and_no_endless_loop(tmp_path, epochs):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(StorageError, match=r"replay\.files: none of the files holds a group"):
        await names([tmp_path / "a.jsonl"], epochs=epochs)


def test_files_are_found_beside_the_config_or_by_pattern(tmp_path):
    for name in ("old [1]/b.jsonl", "old [1]/a.jsonl", "old [1]/deep/c.parquet", "other.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    old = tmp_path / "old [1]"
    assert find_files("old [1]/b.jsonl", tmp_path) == [old / "b.jsonl"]
    assert find_files("*.jsonl", old) == [old / "a.jsonl", old / "b.jsonl"]
    assert find_files("**/*.parquet", tmp_path) == [old / "deep/c.parquet"]
    assert find_files(str(old / "a.jsonl"), Path("/elsewhere")) == [old / "a.jsonl"]
    with pytest.raises(ConfigError, match=r'replay\.files: "\*\.arrow" matches no file'):
        find_files("*.arrow", tmp_path)
    with pytest.raises(ConfigError, match=r"other\.csv is neither rollouts\.parquet of a batch nor a \.jsonl file"):
        find_files("other.*", tmp_path)
    with pytest.raises(ConfigError, match="matches no file"):
        find_files("old [1]", tmp_path)


async def test_a_run_that_is_taken_up_again_gets_no_group_twice_whatever_its_name_and_epoch(tmp_path):
    (tmp_path / "posted.jsonl").write_text("\n".join(line(name) for name in "abac"))

    async def left(given):
        files = ReplayFiles([tmp_path / "posted.jsonl"], epochs=2, limits=NO_LIMITS, given=given)
        return "".join([group.name async for group in files])

    assert await left({}) == "abacabac"
    assert await left({"a": 1, "b": 1}) == "acabac"
    assert await left({"a": 3, "b": 1, "c": 1}) == "bac"
    assert await left({"a": 9, "b": 9, "c": 9, "gone": 2}) == ""
