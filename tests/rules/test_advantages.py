"""Advantages: the papers' formulas on small numbers, and what holds for all rewards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from headway.errors import EnvironmentFailed
from headway.rules.advantages import ADVANTAGES, GROUP_RELATIVE, STD_EPSILON, dr_grpo, grpo, max_rl, rloo

ANY = st.floats(allow_nan=False, allow_infinity=False)
SHARE = st.floats(0, 1)
MODEST = st.floats(-1e3, 1e3)


def groups(values, *, least=1):
    return arrays(np.float64, st.integers(least, 16), elements=values)


def rewards_for(name):
    return groups(SHARE if name == "max_rl" else ANY)


@pytest.mark.parametrize("name", ADVANTAGES)
@given(data=st.data())
def test_advantages_are_finite_in_float32_and_shaped_like_the_rewards(name, data):
    rewards = data.draw(rewards_for(name))
    before = rewards.copy()
    advantages = ADVANTAGES[name](rewards)
    assert advantages.shape == rewards.shape
    assert np.isfinite(advantages.astype(np.float32)).all()
    np.testing.assert_array_equal(rewards, before)


@pytest.mark.parametrize("name", ADVANTAGES)
@given(data=st.data(), n=st.integers(1, 16))
def test_equal_rewards_give_exact_zeros(name, data, n):
    reward = data.draw(SHARE if name == "max_rl" else ANY)
    assert not ADVANTAGES[name](np.full(n, reward)).any()


@pytest.mark.parametrize("name", ADVANTAGES)
@given(data=st.data())
def test_a_better_reward_never_gets_a_lower_advantage(name, data):
    rewards = data.draw(rewards_for(name))
    ordered = ADVANTAGES[name](np.sort(rewards))
    assert (np.diff(ordered) >= 0).all()


@pytest.mark.parametrize("name", ADVANTAGES)
@given(rewards=groups(st.integers(0, 8).map(lambda eighths: eighths / 8), least=2))
def test_advantages_of_a_group_sum_to_zero(name, rewards):
    assert abs(ADVANTAGES[name](rewards).sum()) < 1e-9


@given(rewards=groups(MODEST, least=2))
def test_rloo_compares_each_reward_with_the_mean_of_the_others(rewards):
    n = len(rewards)
    others = np.array([np.delete(rewards, i).mean() for i in range(n)])
    np.testing.assert_allclose(rloo(rewards), rewards - others, atol=1e-9)


@given(rewards=groups(MODEST), shift=MODEST)
def test_a_constant_added_to_all_rewards_changes_nothing_but_max_rl(rewards, shift):
    for advantage in (dr_grpo, rloo):
        np.testing.assert_allclose(advantage(rewards + shift), advantage(rewards), atol=1e-9)


@given(rewards=groups(st.integers(-8, 8).map(float), least=2), scale=st.sampled_from([0.5, 2.0, 1024.0]))
def test_grpo_does_not_see_the_scale_of_rewards_dr_grpo_does(rewards, scale):
    np.testing.assert_allclose(grpo(rewards * scale), grpo(rewards), atol=1e-4)
    np.testing.assert_allclose(dr_grpo(rewards * scale), dr_grpo(rewards) * scale)


def test_grpo_by_hand_with_the_population_standard_deviation():
    np.testing.assert_allclose(grpo(np.array([1.0, 0.0, 0.0, 0.0])), np.array([0.75, -0.25, -0.25, -0.25]) / (np.sqrt(3) / 4 + 1e-6))


def test_dr_grpo_by_hand():
    np.testing.assert_array_equal(dr_grpo(np.array([1.0, 0.0, 0.0, 0.0])), [0.75, -0.25, -0.25, -0.25])


def test_rloo_by_hand():
    np.testing.assert_allclose(rloo(np.array([1.0, 0.0, 0.0, 0.0])), [1.0, -1 / 3, -1 / 3, -1 / 3])


def test_max_rl_by_hand_a_rare_success_weighs_more():
    np.testing.assert_allclose(max_rl(np.array([1.0, 0.0, 0.0, 0.0])), [3.0, -1.0, -1.0, -1.0])
    np.testing.assert_allclose(max_rl(np.array([1.0, 1.0, 1.0, 0.0])), [1 / 3, 1 / 3, 1 / 3, -1.0])


@pytest.mark.parametrize("reward", [-0.1, 1.5])
def test_max_rl_refuses_rewards_outside_0_to_1_by_name(reward):
    with pytest.raises(EnvironmentFailed, match="max_rl"):
        max_rl(np.array([0.0, reward]))


def test_every_shipped_advantage_is_zero_in_a_group_of_one():
    for name in GROUP_RELATIVE:
        assert not ADVANTAGES[name](np.array([0.7])).any()


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_nobody_gets_nothing(name):
    assert ADVANTAGES[name](np.zeros(0)).shape == (0,)


@given(rewards=groups(ANY))
def test_grpo_is_to_the_last_bit_what_the_means_of_numpy_make_of_it(rewards):
    limit = float(np.finfo(np.float32).max)
    held = np.clip(rewards, -limit, limit)
    centred = np.zeros(len(rewards)) if (rewards == rewards[0]).all() else held - np.mean(held)
    scale = np.abs(centred).max()
    std = scale * np.sqrt(np.mean((centred / scale) ** 2)) if scale > 0 else 0.0
    np.testing.assert_array_equal(grpo(rewards), np.clip(centred / (std + STD_EPSILON), -limit, limit))
