"""Losses against values worked out by hand, gradients against finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from headway.embedded.trainer.losses import LOSSES, LossLimits, decoupled_ppo, ppo, reinforce, tis, token_weights  # noqa: E402

pytestmark = pytest.mark.torch

LIMITS = LossLimits(clip_low=0.2, clip_high=0.28, importance_cap=2.0)


def logs(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def gradient(loss, logprobs, behaviour, proximal, advantages, limits=LIMITS):
    logprobs = logprobs.clone().requires_grad_()
    value = loss(logprobs, behaviour, proximal, advantages, limits).value.sum()
    return torch.autograd.grad(value, logprobs)[0]


def test_reinforce_is_minus_advantage_times_logprob():
    token = reinforce(logs(0.5, 0.25), logs(0.1, 0.9), logs(0.1, 0.9), numbers(2.0, -1.0), LIMITS)
    torch.testing.assert_close(token.value, numbers(2 * math.log(2), -math.log(4)))
    assert not token.clipped.any()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 3.0, -3.0, False),
        (1.1, 1.0, -1.1, False),
        (1.5, 1.0, -1.28, True),  # a gain is held at 1 + high
        (1.5, -1.0, 1.5, False),  # a loss is not
        (0.5, -1.0, 0.8, True),  # a falling probability of a bad token is held at 1 - low
        (0.5, 1.0, -0.5, False),
    ],
)
def test_ppo_by_hand(ratio, advantage, loss, clipped):
    token = ppo(logs(0.4 * ratio), logs(0.4), logs(0.9), numbers(advantage), LIMITS)
    torch.testing.assert_close(token.value, numbers(loss))
    assert bool(token.clipped) is clipped


@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.5), (1.5, 1.5), (3.0, 2.0)])
def test_tis_by_hand(ratio, weight):
    token = tis(logs(0.2 * ratio), logs(0.2), logs(0.9), numbers(-1.5), LIMITS)
    torch.testing.assert_close(token.value, weight * 1.5 * logs(0.2 * ratio))
    assert bool(token.clipped) is (ratio > 2)


def test_decoupled_ppo_by_hand_the_clip_sees_the_proximal_and_the_weight_the_behaviour_policy():
    # proximal / behaviour = 1.5; policy / proximal = 1.4, clipped to 1.28
    token = decoupled_ppo(logs(0.42), logs(0.2), logs(0.3), numbers(2.0), LIMITS)
    torch.testing.assert_close(token.value, numbers(-1.5 * 1.28 * 2))
    assert token.clipped.all()
    # proximal / behaviour = 3, capped at 2; policy / proximal = 1
    torch.testing.assert_close(decoupled_ppo(logs(0.3), logs(0.1), logs(0.3), numbers(2.0), LIMITS).value, numbers(-4.0))


def test_on_policy_all_corrected_losses_have_the_gradient_of_reinforce():
    logprobs, advantages = logs(0.1, 0.5, 0.9), numbers(1.0, -2.0, 0.5)
    expected = gradient(reinforce, logprobs, logprobs, logprobs, advantages)
    for loss in LOSSES.values():
        torch.testing.assert_close(gradient(loss, logprobs, logprobs, logprobs, advantages), expected)


@pytest.mark.parametrize("name", ["ppo", "decoupled_ppo", "reinforce"])
def test_gradients_equal_finite_differences(name):
    chance = torch.Generator().manual_seed(3)
    behaviour, proximal, logprobs = (-torch.rand(64, generator=chance, dtype=torch.float64) * 2 for _ in range(3))
    advantages = torch.randn(64, generator=chance, dtype=torch.float64)
    step = 1e-6

    def value(at):
        return LOSSES[name](at, behaviour, proximal, advantages, LIMITS).value

    difference = (value(logprobs + step) - value(logprobs - step)) / (2 * step)
    torch.testing.assert_close(gradient(LOSSES[name], logprobs, behaviour, proximal, advantages), difference, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_tis_does_not_flow_through_its_weight():
    logprobs, behaviour, advantages = logs(0.3, 0.3, 0.9), logs(0.2, 0.6, 0.1), numbers(1.0, -2.0, 1.0)
    expected = -torch.minimum((logprobs - behaviour).exp(), numbers(2.0)) * advantages
    torch.testing.assert_close(gradient(tis, logprobs, behaviour, behaviour, advantages), expected)


def test_clipped_tokens_have_no_gradient():
    assert gradient(ppo, logs(0.6), logs(0.4), logs(0.4), numbers(1.0)) == 0
    assert gradient(decoupled_ppo, logs(0.6), logs(0.1), logs(0.4), numbers(1.0)) == 0


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("behaviour", [-300.0, 0.0])
def test_losses_stay_finite_when_two_policies_disagree_beyond_measure(name, behaviour):
    logprobs = torch.tensor([-0.1, -200.0], requires_grad=True)
    there = torch.full((2,), behaviour)
    token = LOSSES[name](logprobs, there, there, torch.tensor([1.0, -1.0]), LIMITS)
    token.value.sum().backward()
    assert token.value.isfinite().all()
    assert logprobs.grad.isfinite().all()


# ------------------------------------------------------------------------------------------------------------------------- aggregation


def test_token_aggregation_weighs_every_token_alike():
    np.testing.assert_allclose(token_weights("token", np.array([2, 6]), 0), [1 / 8, 1 / 8])


def test_sequence_aggregation_weighs_every_sample_alike():
    np.testing.assert_allclose(token_weights("sequence", np.array([2, 6]), 0), [1 / 4, 1 / 12])


def test_constant_aggregation_does_not_look_at_lengths():
    np.testing.assert_allclose(token_weights("constant", np.array([2, 6]), 10), [1 / 20, 1 / 20])


def test_samples_without_a_token_of_their_own_do_not_divide_by_zero():
    for aggregation in ("token", "sequence", "constant"):
        assert np.isfinite(token_weights(aggregation, np.array([0, 0]), 0)).all()
