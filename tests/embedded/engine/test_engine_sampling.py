"""Sampling: the processed distribution, and nothing outside it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

torch = pytest.importorskip("torch")

from headway.embedded.engine.sampling import Knobs, sample, uniforms  # noqa: E402  (needs torch)

pytestmark = pytest.mark.torch

LARGEST = 1 - 2.0**-53  # the largest uniform there is


def knobs(draws, *, temperature=1.0, top_k=0, top_p=1.0) -> Knobs:
    n = len(draws)
    return Knobs(
        np.full(n, temperature, np.float32), np.full(n, top_k, np.int64), np.full(n, top_p, np.float32), np.asarray(draws, np.float64)
    )


def reference(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Processed probabilities of one row, token by token."""
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    order = sorted(range(len(logits)), key=lambda i: -scaled[i])
    kept = order[: top_k or len(order)]
    weights = np.exp(scaled[kept])
    weights /= weights.sum()
    nucleus = [token for i, token in enumerate(kept) if i == 0 or weights[:i].sum() < top_p]
    out = np.zeros(len(logits))
    out[nucleus] = np.exp(scaled[nucleus])
    return out / out.sum()


@settings(deadline=None, max_examples=150)
@given(
    logits=arrays.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(2, 40)), elements=st.floats(-40, 40, width=32)),
    temperature=st.floats(0.05, 4),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.01, 1),
    draw=st.one_of(st.sampled_from([0.0, LARGEST]), st.floats(0, LARGEST)),
)
def test_a_token_outside_top_k_or_top_p_is_never_picked(logits, temperature, top_k, top_p, draw):
    tokens, logprobs = sample(torch.from_numpy(logits), knobs([draw] * len(logits), temperature=temperature, top_k=top_k, top_p=top_p))
    for row, token, logprob in zip(logits, tokens.tolist(), logprobs.tolist(), strict=True):
        assert np.isfinite(logprob)
        scaled = (row - row.max()) / np.float32(temperature)  # in the sampler's precision: what is alike there is equally likely
        likelier = scaled > scaled[token]
        if top_k:  # no more than k - 1 tokens are strictly likelier
            assert likelier.sum() < top_k
        mass = np.exp(scaled.astype(np.float64))
        assert mass[likelier].sum() / np.sort(mass)[::-1][: top_k or len(row)].sum() < top_p + 1e-5


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.8), (0.9, 9, 0.7)])
def test_evenly_spread_uniforms_give_each_token_its_share_and_its_logprob(temperature, top_k, top_p):
    n = 20_000
    logits = np.random.default_rng(1).normal(size=23).astype(np.float32) * 2
    draws = (np.arange(n) + 0.5) / n
    tokens, logprobs = sample(torch.from_numpy(logits).expand(n, -1), knobs(draws, temperature=temperature, top_k=top_k, top_p=top_p))
    expected = reference(logits, temperature, top_k, top_p)
    shares = np.bincount(tokens.numpy(), minlength=len(logits)) / n
    np.testing.assert_allclose(shares, expected, atol=2 / n)
    np.testing.assert_allclose(logprobs.numpy(), np.log(expected[tokens.numpy()]), atol=1e-5)


def test_greedy_takes_the_likeliest_token_at_log_probability_zero_beside_rows_that_sample():
    logits = torch.tensor([[0.0, 3.0, 1.0]] * 2)
    mixed = Knobs(np.array([0, 1], np.float32), np.zeros(2, np.int64), np.ones(2, np.float32), np.array([0.99, 0.99]))
    tokens, logprobs = sample(logits, mixed)
    assert tokens.tolist() == [1, 2]
    assert logprobs[0].item() == 0
    assert logprobs[1].item() == pytest.approx(torch.log_softmax(logits[1], -1)[2].item(), abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_show_in_the_log_probability(temperature, broken):
    _, logprobs = sample(torch.tensor([[0.0, broken, 1.0]]), knobs([0.5], temperature=temperature))
    assert not np.isfinite(logprobs.item())


def test_a_small_temperature_does_not_overflow():
    tokens, logprobs = sample(torch.tensor([[-3e4, 3e4, 2.9e4]]), knobs([LARGEST], temperature=1e-4))
    assert tokens.item() == 1
    assert logprobs.item() == 0


@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 2**20))
def test_a_uniform_is_in_range_and_depends_on_seed_and_index_alone(seed, index):
    seeds, indices = np.array([seed, 7, seed], np.uint64), np.array([index, 3, index], np.uint64)
    together = uniforms(seeds, indices)
    assert ((together >= 0) & (together < 1)).all()
    assert together[0] == together[2] == uniforms(seeds[:1], indices[:1])[0]


def test_uniforms_are_even_across_indices_and_across_neighbouring_seeds():
    for seeds, indices in ((np.full(4096, 3), np.arange(4096)), (np.arange(4096), np.zeros(4096))):
        draws = uniforms(seeds.astype(np.uint64), indices.astype(np.uint64))
        counts = np.histogram(draws, bins=16, range=(0, 1))[0]
        assert ((counts - 256) ** 2 / 256).sum() < 45  # chi-square of 15 degrees: one in 10,000 is above
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.06
