"""A payload whose parts do not go together is refused by name, whoever wrote it, and is never another rollout."""

import dataclasses
import struct

import msgspec
import numpy as np
import pytest
from rollout_strategies import batch_of, plain_sample, rollout_of

from headway.errors import StorageError
from headway.formats.batch import assemble
from headway.formats.rollout import decode_samples, encode_samples

HEADER = struct.Struct("<4s4I")


def sample(**extras):
    return dataclasses.replace(plain_sample([3, 4]), extras={name: np.asarray(value) for name, value in extras.items()})


def with_counts(*, samples=None, counts=None):
    """Return a payload of two samples whose header, or whose counts of tokens and spans, say otherwise; its size is what they say."""
    data = encode_samples([plain_sample([3]), plain_sample([4])])
    magic, _, n, m, tail = HEADER.unpack_from(data)
    samples = 2 if samples is None else samples
    told = struct.unpack_from("<4I", data, HEADER.size) if counts is None else counts
    return HEADER.pack(magic, samples, n, m, tail) + struct.pack(f"<{len(told)}I", *told) + data[HEADER.size + 16 :]


@pytest.mark.parametrize(
    "data",
    [
        with_counts(samples=0, counts=()),
        with_counts(counts=(0, 6, 1, 1)),
        with_counts(counts=(3, 2, 1, 1)),
        with_counts(counts=(3, 3, 1, 2)),
    ],
    ids=["no sample", "a sample without tokens", "tokens of no sample", "a stamp too many"],
)
def test_samples_whose_lengths_do_not_add_up(data):
    assert len(decode_samples(with_counts())) == 2
    with pytest.raises(StorageError, match="garbled: the lengths of its samples do not add up"):
        decode_samples(data)


def with_tail(rows):
    """Return a payload of one sample with these rows of policies and extras."""
    data = encode_samples([sample()])
    magic, samples, n, m, _ = HEADER.unpack_from(data)
    tail = msgspec.msgpack.encode(rows)
    return HEADER.pack(magic, samples, n, m, len(tail)) + data[HEADER.size :] + tail


@pytest.mark.parametrize("dtype", ["<f4", "<f8", "<f2", "|i1", "|u1", "|b1", "<i8", "<u2"])
def test_extras_come_back_as_numbers_of_their_type(dtype):
    written = np.array([[1, 0, 1]], np.dtype(dtype))
    (read,) = decode_samples(encode_samples([sample(scores=written)]))
    np.testing.assert_array_equal(read.extras["scores"], written)
    assert read.extras["scores"].dtype == written.dtype


@pytest.mark.parametrize(
    "extra",
    [
        ("|O8", (1,), b"12345678"),
        ("|V4", (2,), b"12345678"),
        (",f4", (2,), b"12345678"),  # one bit of "<f4"; numpy would call it invalid syntax
        ("(2)<f4,<i4", (1,), b"12345678"),
        ("<f3", (2,), b"12345678"),
        ("", (2,), b"12345678"),
        ("<f4", (3,), b"12345678"),
        ("<f4", (-1,), b"12345678"),
        ("<f4", (2**63,), b"12345678"),
        ("<f4", (1,), b"123"),
    ],
)
def test_extras_that_are_no_array(extra):
    assert decode_samples(with_tail([("policy", {"scores": ("<f4", (2,), b"12345678")})]))
    with pytest.raises(StorageError, match="garbled: its extras cannot be read") as found:
        decode_samples(with_tail([("policy", {"scores": extra})]))
    assert "\n" not in str(found.value)


def test_extras_of_another_number_of_samples():
    with pytest.raises(StorageError, match="extras belong to another number of samples"):
        decode_samples(with_tail([("policy", {}), ("policy", {})]))


def test_a_batch_names_the_rollout_whose_payload_is_damaged_and_knows_no_empty_batch():
    whole, damaged = rollout_of([plain_sample([3])]), rollout_of([plain_sample([3])], group=1)
    damaged = msgspec.structs.replace(damaged, payload=with_tail([("policy", {"scores": (",f4", (2,), b"12345678")})]))
    with pytest.raises(StorageError, match=r"^batch 3: rollout \d+-\d+: rollout payload is garbled: its extras"):
        assemble(batch_of([[whole], [damaged]], k=3, max_staleness=1))
    with pytest.raises(StorageError, match=r"^batch 3 holds no rollout"):
        assemble(batch_of([], k=3, max_staleness=1))
    with pytest.raises(StorageError, match="no finite reward and advantage"):
        assemble(batch_of([[whole]], k=3, max_staleness=1, advantages=[[float("inf")]]))
