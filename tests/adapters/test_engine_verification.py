"""What a few tokens say of an engine: whether its log-probabilities are processed, and whether it serves what it was given. No I/O."""

import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.adapters.engines.verification import Token, are_raw, differs_from_probe, not_cut
from headway.errors import StorageError
from headway.formats.probe import NAME, Probe, read_probe, write_probe
from headway.types import SamplingParams

logits = st.lists(st.floats(-6, 6, width=32), min_size=8, max_size=40)


def log_softmax(values, temperature=1.0):
    scaled = np.asarray(values, np.float64) / temperature
    scaled = scaled - scaled.max()
    return scaled - np.log(np.exp(scaled).sum())


def likeliest(rows, *, scaled_by=1.0, cut=False, noise=0.0):
    """The likeliest token of each row with its log-probability: at a temperature, or in the distribution that is cut to the one token."""
    found = []
    for number, row in enumerate(rows):
        best = int(np.argmax(row))
        found.append(Token(best, 0.0 if cut else float(log_softmax(row, scaled_by)[best]) + noise * (-1) ** number))
    return found


def telling(rows):
    """Rows in which the temperature shows: two tokens at least compete, and not all of them alike, nor a few of them and no others."""
    found = [row for row in rows if log_softmax(row).max() < -0.5 and max(row) - float(np.mean(row)) > 1.0]
    found = [row for row in found if log_softmax(row, 0.5).max() - log_softmax(row).max() > 0.03]  # not where nine or more are alike
    return [row for row in found if min(abs(log_softmax(row).max() + np.log(tied)) for tied in range(2, 9)) > 0.02]


def test_tokens_that_half_precision_makes_equally_likely_are_not_taken_for_raw_ones():
    """As measured at vLLM with a nearly uniform model in bfloat16: top_k = 1 keeps all tokens that are as likely as the likeliest."""
    at_both = [Token(42, -0.6931), Token(25, 0.0), Token(38, 0.0), Token(38, -1.0986)]
    assert not are_raw(at_both, at_both)
    assert not not_cut(at_both, SamplingParams(top_p=0.9))


@given(st.lists(logits, min_size=1, max_size=8), st.floats(0, 0.009))
def test_the_same_at_both_temperatures_is_raw_also_with_the_noise_of_half_precision(rows, noise):
    rows = telling(rows)
    assert are_raw(likeliest(rows), likeliest(rows, noise=noise)) == bool(rows)


@given(st.lists(logits, max_size=8))
def test_what_is_scaled_or_cut_is_not_raw(rows):
    rows = telling(rows)
    assert not are_raw(likeliest(rows), likeliest(rows, scaled_by=0.5))
    assert not are_raw(likeliest(rows, cut=True), likeliest(rows, cut=True))


def test_only_what_both_answers_have_in_common_is_compared():
    one = [Token(1, -2.0), Token(2, -1.0), Token(3, -0.5)]
    assert are_raw(one, [Token(1, -2.0), Token(9, -4.0), Token(8, -4.0)])
    assert not are_raw(one, [Token(9, -2.0), Token(2, -1.0), Token(3, -0.5)])
    assert not are_raw([], [])
    assert not are_raw([Token(1, -0.001)], [Token(1, -0.001)]), "a token that is certain looks alike at any temperature"


@pytest.mark.parametrize(
    ("sampling", "keys"),
    [
        (SamplingParams(temperature=0.7), ""),
        (SamplingParams(top_p=0.9), "rollout.top_p = 1"),
        (SamplingParams(top_k=5), "rollout.top_k = 0"),
        (SamplingParams(top_p=0.9, top_k=5), "rollout.top_p = 1 and rollout.top_k = 0"),
    ],
)
def test_an_engine_that_forgets_what_was_cut_off_will_do_as_long_as_nothing_is(sampling, keys):
    assert not_cut([Token(1, 0.0), Token(2, -1.5)], sampling) == keys
    assert not_cut([Token(1, 0.0), Token(2, -0.001)], sampling) == ""


@given(logits, st.floats(-3, 3))
def test_a_token_agrees_with_the_probe_within_the_tolerance_and_not_beyond(values, off):
    probe = Probe((1, 2), log_softmax(values).astype(np.float32))
    token = int(np.argmin(values))
    stated = float(probe.logprobs[token])
    allowed = 0.15 + 0.05 * abs(stated)
    if abs(abs(off) - allowed) > 1e-6:
        assert bool(differs_from_probe(probe, Token(token, stated + off))) == (abs(off) > allowed)


def test_a_token_that_the_weights_do_not_have_contradicts_the_probe():
    probe = Probe((1,), log_softmax([0.0, 1.0, 2.0]).astype(np.float32))
    assert "token 3" in differs_from_probe(probe, Token(3, -1.0))
    assert differs_from_probe(probe, Token(0, float("nan")))


@given(values=st.lists(st.floats(-6, 6, width=32), min_size=2, max_size=50), ids=st.lists(st.integers(0, 1), min_size=1, max_size=9))
def test_a_probe_is_read_as_it_was_written(tmp_path_factory, values, ids):
    directory = tmp_path_factory.mktemp("probe")
    logprobs = log_softmax(values).astype(np.float32)
    write_probe(directory, Probe(tuple(ids), logprobs))
    probe = read_probe(directory)
    assert probe is not None
    assert probe.token_ids == tuple(ids)
    assert np.array_equal(probe.logprobs, logprobs)


def test_where_there_is_no_probe_there_is_none(tmp_path):
    assert read_probe(tmp_path) is None
    assert read_probe(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"token_ids": np.array([1], np.int32)}, "cannot be read"),
        ({"token_ids": np.array([1.0]), "logprobs": np.log(np.full(4, 0.25, np.float32))}, "no list of 1 to"),
        ({"token_ids": np.zeros(0, np.int32), "logprobs": np.log(np.full(4, 0.25, np.float32))}, "no list of 1 to"),
        ({"token_ids": np.array([4], np.int32), "logprobs": np.log(np.full(4, 0.25, np.float32))}, "go beyond"),
        ({"token_ids": np.array([-1], np.int32), "logprobs": np.log(np.full(4, 0.25, np.float32))}, "go beyond"),
        ({"token_ids": np.array([1], np.int32), "logprobs": np.full(4, 0.25, np.float32)}, "add up to"),
        ({"token_ids": np.array([1], np.int32), "logprobs": np.full(4, np.nan, np.float32)}, "add up to"),
        ({"token_ids": np.array([1], np.int32), "logprobs": np.array([1, 2])}, "no list of numbers"),
        ({"token_ids": np.array([None]), "logprobs": np.log(np.full(4, 0.25, np.float32))}, "cannot be read"),
    ],
)
def test_a_probe_that_is_of_no_use_is_refused_by_its_name(tmp_path, arrays, says):
    np.savez(tmp_path / NAME, allow_pickle=True, **arrays)
    with pytest.raises(StorageError, match=rf"probe\.npz: .*{says}"):
        read_probe(tmp_path)


@pytest.mark.parametrize("content", [b"", b"PK", b"no archive", b"\x93NUMPY"])
def test_what_is_no_archive_is_no_probe(tmp_path, content):
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(StorageError, match=r"probe\.npz: cannot be read"):
        read_probe(tmp_path)


def test_a_probe_that_claims_more_numbers_than_memory_holds_is_refused(tmp_path):
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1125899906842624,), }".ljust(117) + b"\n"
    with zipfile.ZipFile(tmp_path / NAME, "w") as archive:
        for name in ("token_ids", "logprobs"):
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(12))
    with pytest.raises(StorageError, match=r"probe\.npz: cannot be read"):
        read_probe(tmp_path)


def test_a_probe_that_is_marked_as_encrypted_is_refused(tmp_path):
    write_probe(tmp_path, Probe((1,), np.log(np.full(4, 0.25, np.float32))))
    content = bytearray((tmp_path / NAME).read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1  # the flags of the first entry in the directory
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(StorageError, match=r"probe\.npz: cannot be read: .*encrypted"):
        read_probe(tmp_path)
