import dataclasses
import json
import math
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
from hypothesis import given, settings
from rollout_strategies import batch_of, batches, plain_sample, rollout_of

from headway.errors import BoundBreached, StorageError
from headway.formats.batch import DTYPES, RECORDS, TENSORS, assemble, read_batch, write_batch
from headway.formats.manifest import read_manifest, write_manifest
from headway.formats.rollout import decode_samples
from headway.formats.run_directory import RunDirectory


def naive(batch):
    """Token by token, what a batch must hold: rows of its samples that train, and figures of all its rollouts."""
    kept, rollouts = [], []
    row = 0
    for place, group in enumerate(batch.groups):
        for rollout, advantage in zip(group.rollouts, group.advantages, strict=True):
            facts: dict[str, Any] = {
                "ages": [],
                "first": None,
                "loss": 0,
                "masked": (rollout.group, rollout.member) in batch.overlong_masked,
            }
            for sample in decode_samples(rollout.payload):
                versions, mask = [], []
                seen = 0
                for sampled, loss in zip(sample.sampled_mask, sample.loss_mask, strict=True):
                    version = -1
                    if sampled:
                        span = max(j for j, start in enumerate(sample.span_start) if start <= seen)
                        version = int(sample.span_version[span])
                        seen += 1
                    young = batch.on_stale != "mask" or batch.k - version <= batch.max_staleness
                    contributes = bool(loss) and young and not facts["masked"]
                    if loss:
                        facts["loss"] += 1
                        facts["first"] = contributes if facts["first"] is None else facts["first"]
                    if contributes:
                        facts["ages"].append(batch.k - version)
                    versions.append(version)
                    mask.append(int(contributes))
                if any(mask):
                    kept.append((row, place, advantage, sample, versions, mask))
            rollouts.append(facts)
            row += 1
    return kept, rollouts


def nearest_rank(values, share):
    return sorted(values)[math.ceil(share * len(values)) - 1]


@settings(max_examples=100)
@given(batches())
def test_tensors_and_metrics_are_those_of_a_token_by_token_reading(batch):
    kept, rollouts = naive(batch)
    if not kept:
        with pytest.raises(StorageError, match="no token that may train"):
            assemble(batch)
        return
    assembled = assemble(batch)
    assert_tensors(assembled, kept, rollouts)
    assert_metrics(assembled.metrics, batch, rollouts)


def assert_tensors(assembled, kept, rollouts):
    arrays = assembled.arrays
    assert {name: array.dtype for name, array in arrays.items()} == dict(DTYPES)
    offsets = arrays["sample_offsets"].tolist()
    assert len(offsets) == len(kept) + 1
    for i, (row, place, advantage, sample, versions, mask) in enumerate(kept):
        here = slice(offsets[i], offsets[i + 1])
        np.testing.assert_array_equal(arrays["token_ids"][here], sample.token_ids)
        np.testing.assert_array_equal(arrays["logprobs"][here], sample.logprobs)
        assert arrays["versions"][here].tolist() == versions
        assert arrays["loss_mask"][here].tolist() == mask
        assert (arrays["advantages"][here] == np.float32(advantage)).all()
        assert arrays["sample_rollout"][i] == row
        assert arrays["sample_group"][i] == place
        assert arrays["sample_length"][i] == sample.loss_mask.sum()
    causes = tuple(
        None if facts["ages"] else "over_length" if facts["masked"] else "stale" if facts["loss"] else "empty_completion"
        for facts in rollouts
    )
    assert assembled.drop_causes == causes
    assert assembled.trained.tolist() == [bool(facts["ages"]) for facts in rollouts]


def assert_metrics(row, batch, rollouts):
    ages = [age for facts in rollouts for age in facts["ages"]]
    heads = [max(facts["ages"]) for facts in rollouts if facts["ages"]]
    in_loss = sum(facts["loss"] for facts in rollouts)
    assert row["token_staleness_mean"] == pytest.approx(np.mean(ages))
    assert row["head_staleness_mean"] == pytest.approx(np.mean(heads))
    for share in (50, 95, 99):
        assert row[f"token_staleness_p{share}"] == nearest_rank(ages, share / 100)
    assert row["head_staleness_p99"] == nearest_rank(heads, 0.99)
    assert row["token_staleness_max"] == row["head_staleness_max"] == max(ages)
    assert row["contributing_tokens"] == len(ages)
    assert row["masked_tokens"] == in_loss - len(ages)
    assert row["trainable_share"] == pytest.approx(len(ages) / in_loss)
    first = [facts["first"] for facts in rollouts if facts["first"] is not None and not facts["masked"]]
    assert row["head_coverage"] == pytest.approx(sum(first) / len(first))
    everyone = [rollout for group in batch.groups for rollout in group.rollouts]
    assert (row["groups"], row["rollouts"]) == (len(batch.groups), len(everyone))
    assert row["samples"] == sum(rollout.samples for rollout in everyone)
    assert row["tokens"] == sum(rollout.tokens for rollout in everyone)
    assert row["rollout_tokens_max"] == max(rollout.tokens for rollout in everyone)
    assert row["reward_mean"] == pytest.approx(np.mean([rollout.reward for rollout in everyone]))
    assert row["reward_std"] == pytest.approx(np.std([rollout.reward for rollout in everyone]))
    assert json.loads(json.dumps(row, allow_nan=False)) == row  # plain numbers only


def small_batch(**changes):
    young, straddling = rollout_of([plain_sample([3, 3])], group=10, member=0), rollout_of([plain_sample([0, 2])], group=10, member=1)
    old = rollout_of(
        [plain_sample([0])],
        group=11,
        member=0,
        finish="truncated",
        rewards={"format": 0.5, "broken": math.nan},
        metadata={"note": "é", "broken": math.inf},
    )
    long = rollout_of([plain_sample([3]), plain_sample([2, 2, 2])], group=11, member=2, rewards={"format": 1.0})
    fields = {"k": 3, "max_staleness": 1, "overlong_masked": {(11, 2)}, **changes}
    return batch_of([[young, straddling], [old, long]], **fields)


def test_figures_of_a_small_batch():
    row = assemble(small_batch()).metrics
    assert row["batch"] == 3
    assert row["truncated_share"] == 0.25
    assert (row["reward/format_mean"], row["reward/format_share"]) == (0.75, 0.5)
    assert "reward/broken_mean" not in row
    assert row["zero_advantage_groups"] == 0
    assert assemble(small_batch(advantages=[[0, 0], [1, -1]])).metrics["zero_advantage_groups"] == 1


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    yield run
    run.close()


def test_a_written_batch_is_read_back_by_a_trainer_and_by_safetensors(run):
    assembled = assemble(small_batch())
    write_batch(run, assembled, "ab12")
    batch = read_batch(run.batch(3))
    assert (batch.k, batch.lineage, batch.max_staleness, batch.on_stale, batch.temperature) == (3, "ab12", 1, "mask", 0.75)
    assert (batch.min_contributing_version, batch.contributing_tokens) == (2, 3)
    plain = safetensors.numpy.load_file(run.batch(3) / TENSORS)
    assert plain.keys() == DTYPES.keys()
    for name, array in plain.items():
        np.testing.assert_array_equal(array, assembled.arrays[name])
        np.testing.assert_array_equal(array, getattr(batch, name))
    extra = read_manifest(run.batch(3)).extra
    assert extra["batch"] == 3
    assert extra["arrays"]["sample_offsets"] == {"dtype": "int64", "shape": [3]}
    assert sorted(path.name for path in run.batches.iterdir()) == ["00000003"]
    assert (run.batch(3) / TENSORS).stat().st_mode & 0o777 == (run.batch(3) / RECORDS).stat().st_mode & 0o777


def test_the_record_keeps_what_does_not_train_with_its_cause(run):
    batch = small_batch()
    write_batch(run, assemble(batch), "ab12")
    table = pq.read_table(run.batch(3) / RECORDS)
    assert table.column("drop_cause").to_pylist() == [None, None, "stale", "over_length"]
    assert table.column("trained").to_pylist() == [True, True, False, False]
    assert table.column("rollout_id").to_pylist() == ["10-0", "10-1", "11-0", "11-2"]
    assert table.column("advantage").to_pylist() == [-1.0, 0.0, -1.0, 1.0]
    assert table.schema.metadata[b"headway.rollout_schema"] == b"1"
    rows = table.to_pylist()
    assert json.loads(rows[2]["metadata"]) == {"note": "é", "broken": None}
    assert rows[3]["rewards"] == [("format", 1.0)]
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    for row, rollout in zip(rows, rollouts, strict=True):
        assert [row[name] for name in ("prompt_id", "turns", "started", "engine", "reward", "finish")] == [
            rollout.prompt_id,
            rollout.turns,
            rollout.started,
            rollout.engine,
            rollout.reward,
            rollout.finish,
        ]
        for stored, sample in zip(row["samples"], decode_samples(rollout.payload), strict=True):
            for name in ("token_ids", "sampled_mask", "loss_mask", "logprobs", "span_start", "span_version"):
                assert stored[name] == getattr(sample, name).tolist()


def tampered(assembled, **changes):
    return dataclasses.replace(assembled, arrays={**assembled.arrays, **changes})


def test_the_writer_refuses_a_token_over_the_bound_even_if_the_mask_let_it_through(run):
    assembled = assemble(small_batch())
    every_token = assembled.arrays["versions"] >= 0
    with pytest.raises(BoundBreached, match=r"older than max_staleness = 1 allows, the oldest of version 0 \(row 1 of rollouts.parquet\)"):
        write_batch(run, tampered(assembled, loss_mask=every_token.astype(np.uint8)), "ab12")
    assert list(run.batches.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"loss_mask": np.array([0, 0, 1, 1, 0, 0, 1, 1], np.uint8)}, BoundBreached, "older than max_staleness"),
        ({"loss_mask": np.zeros(8, np.uint8)}, StorageError, "no token contributes"),
        ({"logprobs": np.full(8, np.nan, np.float32)}, StorageError, "logprobs holds a value that is not finite"),
        ({"advantages": np.zeros(7, np.float32)}, StorageError, "advantages has 7 entries, expected 8"),
        ({"sample_offsets": np.array([0, 9, 8])}, StorageError, "sample_offsets"),
        ({"sample_length": np.zeros(3, np.int32)}, StorageError, "sample_length has 3 entries, expected 2"),
        ({"token_ids": np.zeros(8, np.int64)}, StorageError, "contract version 1"),
        ({"surplus": np.zeros(8, np.int64)}, StorageError, "contract version 1"),
    ],
)
def test_the_reader_refuses_what_a_trainer_must_not_train_on(run, changes, error, message):
    write_batch(run, assemble(small_batch()), "ab12")
    directory = run.batch(3)
    manifest = read_manifest(directory)
    arrays = safetensors.numpy.load_file(directory / TENSORS)
    safetensors.numpy.save_file({**arrays, **changes}, directory / TENSORS)
    write_manifest(directory, kind="batch", lineage="ab12", id=3, extra=manifest.extra)
    with pytest.raises(error, match=message):
        read_batch(directory)


def test_the_reader_refuses_a_batch_without_a_manifest_and_one_that_changed(run):
    with pytest.raises(StorageError, match="no complete batch"):
        read_batch(run.batch(3))
    write_batch(run, assemble(small_batch()), "ab12")
    data = bytearray((run.batch(3) / TENSORS).read_bytes())
    data[-1] ^= 1
    (run.batch(3) / TENSORS).write_bytes(data)
    with pytest.raises(StorageError, match="SHA-256"):
        read_batch(run.batch(3))


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
def test_wait_and_drop_mask_nothing_so_a_token_that_is_too_old_is_found_and_named(on_stale):
    groups = [[rollout_of([plain_sample([3])])], [rollout_of([plain_sample([1])])]]
    with pytest.raises(
        BoundBreached, match=r"batch 3 would train on 1 tokens older than max_staleness = 1 allows.* version 1 \(rollout \d+-\d+\)"
    ):
        assemble(batch_of(groups, k=3, max_staleness=1, on_stale=on_stale))
    assert assemble(batch_of(groups, k=3, max_staleness=2, on_stale=on_stale)).facts.contributing_tokens == 2


@pytest.mark.parametrize("on_stale", ["mask", "wait", "drop", "train"])
def test_a_replayed_rollout_is_outside_of_the_bound_and_of_the_statistics_and_is_counted(run, on_stale):
    old = msgspec.structs.replace(rollout_of([plain_sample([0])]), source="replay")
    assembled = assemble(batch_of([[rollout_of([plain_sample([9])])], [old]], k=9, max_staleness=0, on_stale=on_stale))
    assert assembled.metrics["token_staleness_max"] == 0
    write_batch(run, assembled, "ab12")
    batch = read_batch(run.batch(9))
    assert (batch.min_contributing_version, batch.contributing_tokens, batch.replayed_tokens) == (9, 2, 1)
    assert sorted(batch.versions[batch.loss_mask != 0].tolist()) == [-1, 9]
    unknown = tampered(assembled, versions=np.full(len(batch.versions), -1, np.int32))
    with pytest.raises(BoundBreached, match="2 tokens without a version, and its manifest knows of 1"):
        write_batch(run, unknown, "ab12")


def test_train_mode_masks_nothing_and_knows_no_bound(run):
    write_batch(run, assemble(small_batch(on_stale="train", overlong_masked=())), "ab12")
    batch = read_batch(run.batch(3))
    assert batch.min_contributing_version == 0
    assert batch.loss_mask.sum() == 9


def test_a_version_that_no_trainer_has_made_is_refused():
    with pytest.raises(BoundBreached, match="version 4, which no trainer has made"):
        assemble(batch_of([[rollout_of([plain_sample([4])])]], k=3, max_staleness=1))


@pytest.mark.parametrize("change", [{"reward": None}, {"reward": math.nan}])
def test_a_batch_holds_finite_rewards_only(change):
    with pytest.raises(StorageError, match="no finite reward"):
        assemble(batch_of([[rollout_of([plain_sample([3])], **change)]], k=3, max_staleness=1))


def test_a_damaged_rollout_is_named():
    good, bad = rollout_of([plain_sample([3])]), rollout_of([plain_sample([3])], group=7, member=1)
    cut = batch_of([[good, rollout_of([plain_sample([3])], group=7, member=1, payload=bad.payload[:-1])]], k=3, max_staleness=1)
    with pytest.raises(StorageError, match="rollout 7-1: rollout payload is cut short"):
        assemble(cut)
    stamps = dataclasses.replace(plain_sample([3, 3]), span_start=np.array([1], np.int32))
    with pytest.raises(StorageError, match="rollout 7-1: rollout payload is garbled: its version stamps"):
        assemble(batch_of([[good, rollout_of([stamps], group=7, member=1)]], k=3, max_staleness=1))


def test_a_batch_is_never_written_over_another(run):
    assembled = assemble(small_batch())
    write_batch(run, assembled, "ab12")
    with pytest.raises(StorageError, match="exists already"):
        write_batch(run, assembled, "ab12")
    assert [path.name for path in run.batches.iterdir()] == ["00000003"]


def test_a_live_rollout_without_a_version_is_refused_and_named():
    nobodys = rollout_of([plain_sample([-1])])
    with pytest.raises(StorageError, match=r"rollout \d+-\d+: a live rollout has a stamp of -1"):
        assemble(batch_of([[nobodys]], k=3, max_staleness=1))
