import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_strategies import plain_sample, rollout_of, samples

from headway.errors import StorageError
from headway.formats.rollout import decode_columns, decode_rollout, decode_samples, encode_rollout, encode_samples
from headway.types import Sample


def assert_same(left: Sample, right: Sample):
    for name in ("token_ids", "sampled_mask", "loss_mask", "logprobs", "span_start", "span_version"):
        a, b = getattr(left, name), getattr(right, name)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert left.policy_id == right.policy_id
    assert left.extras.keys() == right.extras.keys()
    for name, array in left.extras.items():
        assert array.shape == right.extras[name].shape
        np.testing.assert_array_equal(array, right.extras[name])


@given(st.lists(samples(), min_size=1, max_size=4))
def test_samples_come_back_as_they_were(written):
    read = decode_samples(encode_samples(written))
    assert len(read) == len(written)
    for before, after in zip(written, read, strict=True):
        assert_same(before, after)


@given(st.lists(samples(), min_size=1, max_size=3), st.booleans())
def test_decoding_copies_nothing_and_cannot_be_written_to(written, as_view):
    data = encode_samples(written)
    for sample in decode_samples(memoryview(data) if as_view else data):
        for array in (sample.token_ids, sample.logprobs, sample.loss_mask, *sample.extras.values()):
            assert not array.flags.owndata
            assert not array.flags.writeable


@given(st.lists(samples(), min_size=1, max_size=3), st.data())
def test_a_payload_cut_anywhere_is_refused(written, data):
    encoded = encode_samples(written)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(StorageError):
        decode_samples(encoded[:cut])


@given(st.lists(samples(), min_size=1, max_size=3), st.data())
def test_a_garbled_payload_decodes_to_whole_samples_or_is_refused_by_name(written, data):
    encoded = bytearray(encode_samples(written))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        read = decode_samples(bytes(encoded))
    except StorageError:
        return
    for sample in read:
        n = len(sample.token_ids)
        assert len(sample.logprobs) == len(sample.sampled_mask) == len(sample.loss_mask) == n
        assert np.isfinite(sample.logprobs).all()
        assert not (sample.loss_mask & ~sample.sampled_mask).any()


@given(st.binary(max_size=200))
def test_bytes_that_are_no_payload_are_refused(data):
    with pytest.raises(StorageError):
        decode_samples(data)
    with pytest.raises(StorageError):
        decode_rollout(data)


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": np.zeros(5, np.int64)},
        {"logprobs": np.zeros(4, np.float32)},
        {"loss_mask": np.zeros(6, np.bool_)},
        {"sampled_mask": np.zeros((5, 1), np.bool_)},
        {"span_version": np.zeros(3, np.int32)},
        {"token_ids": np.zeros(0, np.int32)},
        {"extras": {"names": np.array(["a"], dtype=object)}},
    ],
)
def test_arrays_of_another_dtype_or_length_are_not_encoded(change):
    with pytest.raises(ValueError, match=r"must be|at least one|only numbers"):
        encode_samples([dataclasses.replace(plain_sample([1, 1, 2]), **change)])


def test_a_rollout_without_samples_is_not_encoded():
    with pytest.raises(ValueError, match="at least one sample"):
        encode_samples([])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"span_start": np.array([1, 2], np.int32)}, "version stamps"),
        ({"span_start": np.array([0, 3], np.int32)}, "version stamps"),
        ({"span_start": np.array([0, 0], np.int32)}, "version stamps"),
        ({"span_version": np.array([1, -2], np.int32)}, "version stamps"),
        ({"span_start": np.zeros(0, np.int32), "span_version": np.zeros(0, np.int32)}, "without a version stamp"),
        ({"loss_mask": np.ones(5, np.bool_)}, "not sampled"),
        ({"logprobs": np.array([0, 0, -1, np.nan, -1], np.float32)}, "not finite"),
    ],
)
def test_stamps_and_numbers_that_cannot_be_true_are_refused_in_any_place(change, message):
    good = plain_sample([1, 1, 2])
    bad = dataclasses.replace(good, **change)
    for place in ([bad], [bad, good], [good, bad]):
        with pytest.raises(StorageError, match=message):
            decode_samples(encode_samples(place))


def test_columns_that_are_not_contiguous_are_encoded_by_value():
    sample = dataclasses.replace(plain_sample([1, 2]), token_ids=np.arange(8, dtype=np.int32)[::2])
    assert decode_samples(encode_samples([sample]))[0].token_ids.tolist() == [0, 2, 4, 6]


def test_columns_lie_side_by_side_over_all_samples():
    columns = decode_columns(encode_samples([plain_sample([1]), plain_sample([2, 3])]))
    assert columns.tokens == (3, 4)
    assert columns.spans == (1, 2)
    assert columns.token_ids.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert columns.span_version.tolist() == [1, 2, 3]


@given(st.lists(samples(), min_size=1, max_size=2), st.dictionaries(st.text(max_size=5), st.integers() | st.none() | st.text(), max_size=3))
def test_rollout_records_come_back_as_they_were(written, metadata):
    metadata = {key: value for key, value in metadata.items() if not isinstance(value, int) or -(2**63) <= value < 2**63}
    rollout = rollout_of(written, reward=None, rewards={"format": 0.5}, metadata=metadata)
    encoded = encode_rollout(rollout)
    assert decode_rollout(encoded) == rollout
    assert decode_rollout(memoryview(encoded)) == rollout


@given(st.data())
def test_a_record_cut_anywhere_is_refused(data):
    encoded = encode_rollout(rollout_of([plain_sample([1, 2])]))
    with pytest.raises(StorageError, match="garbled"):
        decode_rollout(encoded[: data.draw(st.integers(0, len(encoded) - 1))])
