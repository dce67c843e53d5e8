"""One step: what moves the weights and what must not; the schedule; what is measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_runs import TINY, VOCABULARY

torch = pytest.importorskip("torch")

from headway.embedded.trainer.guard import TrainingBatch  # noqa: E402
from headway.embedded.trainer.initialise import random_model  # noqa: E402
from headway.embedded.trainer.losses import LOSSES  # noqa: E402
from headway.embedded.trainer.metrics import against_behaviour  # noqa: E402
from headway.embedded.trainer.scoring import Policy  # noqa: E402
from headway.embedded.trainer.step import learning_rate, make_optimiser, train  # noqa: E402
from headway.errors import TrainerFailed  # noqa: E402
from headway.settings import TrainerSection  # noqa: E402

pytestmark = pytest.mark.torch


def batch_of(*, groups=4, group_size=2, seed=0, staleness=0):
    chance = np.random.default_rng(seed)
    lengths = chance.integers(3, 9, groups * group_size)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths) >= 2
    return TrainingBatch(
        k=3,
        token_ids=chance.integers(0, VOCABULARY, offsets[-1]),
        mask=mask,
        logprobs=np.where(mask, chance.normal(-4, 0.3, offsets[-1]), 0).astype(np.float32),
        advantages=chance.normal(size=offsets[-1]).astype(np.float32),
        staleness=np.full(offsets[-1], staleness),
        offsets=offsets,
        groups=np.repeat(np.arange(groups), group_size),
        sampled_lengths=lengths - 2,
        temperature=1.0,
    )


def without(batch, tokens):
    """Take tokens out of the loss, as a staleness mask does."""
    mask = batch.mask.copy()
    mask[tokens] = False
    return replace(batch, mask=mask)


def settings(**keys):
    return TrainerSection(**{"learning_rate": 1e-2, "gradient_clip": 0.0} | keys)


def trained(batch, **keys):
    """Train a fresh tiny model on a batch; return its weights, its last gradients and the measurements."""
    torch.set_num_threads(1)
    section = settings(**keys)
    policy = Policy(random_model(TINY, 1)[0], torch.device("cpu"), torch.float32)
    measured = train(policy, make_optimiser(policy, section), batch, section, rate=section.learning_rate)
    weights = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    return weights, {name: parameter.grad.clone() for name, parameter in policy.model.named_parameters()}, measured


def assert_close(left, right, *, atol=1e-6):
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-4, atol=atol, msg=name)


@pytest.mark.parametrize("loss", LOSSES)
def test_how_samples_are_packed_does_not_change_the_gradient(loss):
    batch = batch_of()
    assert_close(
        trained(batch, loss=loss, entropy_bonus=0.01)[1],
        trained(batch, loss=loss, entropy_bonus=0.01, max_tokens_per_microbatch=10)[1],
    )


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_what_a_masked_token_carries_does_not_reach_the_weights(aggregation):
    batch = batch_of()
    masked = np.flatnonzero(batch.mask)[::3]
    batch = without(batch, masked)
    other = replace(batch, logprobs=batch.logprobs.copy(), advantages=batch.advantages.copy())
    other.logprobs[masked] -= 3
    other.advantages[masked] *= -100
    for one, two in zip(trained(batch, aggregation=aggregation)[:2], trained(other, aggregation=aggregation)[:2], strict=True):
        for name in one:
            assert torch.equal(one[name], two[name])


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_masking_removes_a_tokens_part_and_leaves_the_weight_of_all_others(aggregation):
    batch = batch_of()
    places = np.flatnonzero(batch.mask)
    some, rest = places[::3], np.setdiff1d(places, places[::3])
    keys = {"aggregation": aggregation, "loss": "reinforce"}
    whole, left, right = (trained(one, **keys)[1] for one in (batch, without(batch, some), without(batch, rest)))
    assert_close(whole, {name: left[name] + right[name] for name in whole})


def test_token_and_sequence_aggregation_of_equal_lengths_are_one():
    batch = batch_of(group_size=1, groups=1)
    assert_close(trained(batch, aggregation="token")[1], trained(batch, aggregation="sequence")[1])


def test_zero_advantages_and_no_bonus_leave_the_weights_alone():
    batch = batch_of()
    weights = trained(replace(batch, advantages=np.zeros_like(batch.advantages)))[0]
    assert_close(weights, random_model(TINY, 1)[0].state_dict(), atol=0)


def test_the_entropy_bonus_raises_the_entropy():
    batch = batch_of()
    still = replace(batch, advantages=np.zeros_like(batch.advantages))
    torch.set_num_threads(1)
    section = settings(entropy_bonus=1.0)
    policy = Policy(random_model(TINY, 1)[0], torch.device("cpu"), torch.float32)
    optimiser = make_optimiser(policy, section)
    entropies = [train(policy, optimiser, still, section, rate=1e-2)["entropy"] for _ in range(5)]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0]


def test_training_raises_the_probability_of_what_was_rewarded():
    batch = batch_of()
    torch.set_num_threads(1)
    section = settings(loss="reinforce")
    rewarded = replace(batch, advantages=np.ones_like(batch.advantages))
    policy = Policy(random_model(TINY, 1)[0], torch.device("cpu"), torch.float32)
    optimiser = make_optimiser(policy, section)
    losses = [train(policy, optimiser, rewarded, section, rate=1e-2)["loss"] for _ in range(10)]
    assert losses[-1] < losses[0] - 1


def test_the_first_minibatch_of_decoupled_ppo_is_its_own_proximal_policy():
    """A batch that equals the trainer's own scores is on-policy: the ratios to it are 1 in all minibatches, by the weights of the start."""
    batch = batch_of()
    torch.set_num_threads(1)
    section = settings(minibatches=2)
    policy = Policy(random_model(TINY, 1)[0], torch.device("cpu"), torch.float32)
    ids = torch.from_numpy(batch.token_ids)
    own = np.zeros_like(batch.logprobs)
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        with torch.no_grad():
            logits = policy.model(input_ids=ids[None, start:end], use_cache=False).logits[0]
        own[start + 1 : end] = logits[:-1].log_softmax(-1).gather(-1, ids[start + 1 : end, None])[:, 0]
    measured = train(policy, make_optimiser(policy, section), replace(batch, logprobs=own), section, rate=1e-2)
    assert measured["mismatch_kl"] < 1e-9
    assert measured["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert measured["ess"] == pytest.approx(1, abs=1e-5)


def test_minibatches_step_the_optimiser_once_each_and_a_tail_batch_of_one_group_once():
    for groups, steps in ((4, 2), (1, 1)):
        torch.set_num_threads(1)
        section = settings(minibatches=2)
        policy = Policy(random_model(TINY, 1)[0], torch.device("cpu"), torch.float32)
        optimiser = make_optimiser(policy, section)
        train(policy, optimiser, batch_of(groups=groups), section, rate=1e-2)
        assert {int(state["step"]) for state in optimiser.state.values()} == {steps}


def test_a_gradient_that_is_not_finite_ends_training_by_name():
    batch = batch_of()
    huge = replace(batch, advantages=np.full_like(batch.advantages, 3e38))
    with pytest.raises(TrainerFailed, match="batch 3: the gradient"):
        trained(huge, loss="reinforce")


# ---------------------------------------------------------------------------------------------------------------------------- schedule


def test_the_learning_rate_warms_up_linearly_then_falls_by_a_cosine_to_its_share():
    section = settings(learning_rate=1.0, warmup_steps=10, schedule_steps=110, final_learning_rate_share=0.1)
    rates = [learning_rate(section, k, steps=500) for k in range(130)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55)
    assert rates[110:] == pytest.approx([0.1] * 20)


def test_without_schedule_steps_the_cosine_ends_with_the_run():
    section = settings(learning_rate=1.0, warmup_steps=0, final_learning_rate_share=0.0)
    assert learning_rate(section, 0, steps=40) == 1.0
    assert learning_rate(section, 40, steps=40) == pytest.approx(0.0)


@given(k=st.integers(0, 10_000), warmup=st.integers(0, 100), steps=st.integers(1, 1000), share=st.floats(0, 1))
def test_the_learning_rate_stays_between_nothing_and_its_peak(k, warmup, steps, share):
    section = settings(learning_rate=3e-4, warmup_steps=warmup, final_learning_rate_share=share)
    assert 0 <= learning_rate(section, k, steps) <= 3e-4 * (1 + 1e-12)


# ----------------------------------------------------------------------------------------------------------------------------- metrics


def test_figures_against_the_behaviour_policy_by_hand():
    start = np.log(np.array([0.2, 0.6, 0.1], dtype=np.float32))
    behaviour = np.log(np.array([0.2, 0.3, 0.2], dtype=np.float32))
    measured = against_behaviour(start, behaviour, np.array([0, 0, 3]))
    assert measured["ratio_mean"] == pytest.approx(3.5 / 3)
    assert measured["ratio_max"] == pytest.approx(2)
    assert measured["ess"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert measured["mismatch_kl"] == pytest.approx((1 - np.log(2)) / 2)
    assert measured["by_staleness"]["3-4"]["ratio_mean"] == pytest.approx(0.5)
    assert {name: bucket["tokens"] for name, bucket in measured["by_staleness"].items()} == {"0": 2, "3-4": 1}


def test_without_tokens_of_staleness_0_there_is_no_mismatch_figure():
    assert against_behaviour(np.zeros(2, np.float32), np.zeros(2, np.float32), np.array([1, 2]))["mismatch_kl"] is None


def test_tokens_not_scored_under_the_starting_weights_are_left_out():
    start = np.array([np.nan, 0.0], np.float32)
    measured = against_behaviour(start, np.zeros(2, np.float32), np.array([0, 1]))
    assert measured["by_staleness"].keys() == {"1"}


@given(st.lists(st.tuples(st.floats(-100, 0, width=32), st.floats(-100, 0, width=32), st.integers(0, 30)), min_size=1, max_size=20))
def test_figures_are_finite_and_the_kl_estimate_is_never_negative(rows):
    start, behaviour, staleness = (np.array(column) for column in zip(*rows, strict=True))
    measured = against_behaviour(start.astype(np.float32), behaviour.astype(np.float32), staleness)
    assert 0 < measured["ess"] <= 1 + 1e-9
    assert np.isfinite(measured["ratio_max"])
    assert (measured["mismatch_kl"] or 0) >= -1e-9
    assert sum(bucket["tokens"] for bucket in measured["by_staleness"].values()) == len(rows)
