"""A batch that is not what its contract says is refused in one line, whatever is wrong with it: its manifest, its facts or its arrays."""

import json

import numpy as np
import pytest
import safetensors.numpy
from rollout_strategies import batch_of, plain_sample, rollout_of

from headway.errors import BoundBreached, StorageError
from headway.formats.batch import TENSORS, assemble, check_bound, read_batch, write_batch
from headway.formats.manifest import NAME, read_manifest, write_manifest
from headway.formats.run_directory import RunDirectory

SAMPLES = 3


@pytest.fixture
def written(tmp_path):
    """Return the directory of batch 3: three groups of one rollout, each a sample."""
    run = RunDirectory.create(tmp_path / "run")
    groups = [[rollout_of([plain_sample([3])])] for _ in range(SAMPLES)]
    write_batch(run, assemble(batch_of(groups, k=3, max_staleness=1)), "ab12")
    yield run.batch(3)
    run.close()


def rewrite(directory, *, kind="batch", id=3, arrays=None, extra=None):  # noqa: A002 - the manifest's word
    """Write the batch anew, with a manifest that agrees with its files."""
    facts = dict(read_manifest(directory).extra)
    if arrays is not None:
        found = safetensors.numpy.load_file(directory / TENSORS)
        safetensors.numpy.save_file({**found, **arrays}, directory / TENSORS)
    write_manifest(directory, kind=kind, lineage="ab12", id=id, extra={**facts, **(extra or {})})


def refused(directory):
    with pytest.raises(StorageError) as found:
        read_batch(directory)
    assert "\n" not in str(found.value)
    return str(found.value)


def test_what_was_written_is_read(written):
    assert read_batch(written).k == 3


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"kind": "weights"}, "holds no complete batch"),
        ({"id": 4}, "tells of batch 3, contract version 1: batch 4, contract version 1, can be read here"),
        ({"extra": {"contract_version": 2}}, "tells of batch 3, contract version 2: batch 3, contract version 1, can be read here"),
        ({"extra": {"max_staleness": "two"}}, "does not tell of a batch: Expected `int`, got `str`"),
        ({"extra": {"on_stale": "keep"}}, "does not tell of a batch: Invalid enum value 'keep'"),
    ],
)
def test_a_manifest_that_is_no_such_batch_s(written, how, said):
    rewrite(written, **how)
    assert said in refused(written)


def test_tensors_that_no_manifest_names_have_been_checked_by_nobody(written):
    told = json.loads((written / NAME).read_bytes())
    del told["files"][TENSORS]
    (written / NAME).write_text(json.dumps(told))
    assert f"its manifest names no {TENSORS}" in refused(written)


def test_tensors_that_are_none(written):
    (written / TENSORS).write_bytes(b"\x07" * 64)
    rewrite(written)
    assert "batch.safetensors: cannot be read as a batch" in refused(written)


def cut(*ends):
    """Return an offset for each sample's end but the last, which is right."""
    return lambda n: np.array([0, *ends, n], np.int64)


@pytest.mark.parametrize(
    "offsets",
    [
        lambda _: np.array([], np.int64),
        lambda _: np.array([0], np.int64),
        lambda n: np.array([1, 2, 3, n], np.int64),
        lambda n: np.array([0, 1, 2, n + 1], np.int64),
        cut(2, 2),
        cut(3, 2),
        cut(-1, 2),
        cut(2, 10**9),
        cut(2**62 + 1, -(2**63) + 100),  # rises at each step, in numbers of 64 bits
    ],
)
def test_offsets_that_do_not_cut_the_tokens_into_samples(written, offsets):
    n = len(read_batch(written).token_ids)
    assert n > SAMPLES
    rewrite(written, arrays={"sample_offsets": offsets(n)})
    assert f"sample_offsets do not cut {n} tokens into samples" in refused(written)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("token_ids", -1, "holds a token id, a mask or a version that cannot be"),
        ("loss_mask", 2, "holds a token id, a mask or a version that cannot be"),
        ("versions", -2, "holds a token id, a mask or a version that cannot be"),
        ("sample_rollout", -1, "holds a sample of no rollout, no group or no length"),
        ("sample_group", -1, "holds a sample of no rollout, no group or no length"),
        ("sample_length", -1, "holds a sample of no rollout, no group or no length"),
        ("advantages", np.inf, "advantages holds a value that is not finite"),
    ],
)
def test_a_single_value_that_cannot_be(written, name, value, said):
    changed = safetensors.numpy.load_file(written / TENSORS)[name]
    changed[-1] = value
    rewrite(written, arrays={name: changed})
    assert said in refused(written)


def test_of_many_rollouts_over_the_bound_the_first_are_named_each_once():
    versions = np.zeros(9, np.int32)
    with pytest.raises(BoundBreached, match=r"9 tokens older .* the oldest of version 0 \(row 0, row 1, row 2, row 3, row 4 and 3 more\)$"):
        check_bound(5, 2, "wait", versions, lambda places: [f"row {place % 8}" for place in places])
