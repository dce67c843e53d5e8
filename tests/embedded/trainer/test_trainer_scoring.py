"""Packed scores and gradients equal those of one sample at a time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from trainer_runs import VOCABULARY

torch = pytest.importorskip("torch")
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from headway.embedded.trainer.packing import pack  # noqa: E402
from headway.embedded.trainer.scoring import Policy, self_test  # noqa: E402
from headway.errors import ConfigError, TrainerFailed  # noqa: E402

pytestmark = pytest.mark.torch

LENGTHS = np.array([9, 1, 5, 5, 2, 30, 5, 3, 1, 2])  # ones among them: a sample of one token has nothing to predict
OFFSETS = np.concatenate([[0], np.cumsum(LENGTHS)])
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, OFFSETS[-1])
ROUNDING = 2e-5  # of sums of about 4 in another order, on any processor: 1e-6 was seen; one token mistaken makes more than .01


def everything_contributes():
    mask = np.ones(OFFSETS[-1], dtype=bool)
    mask[OFFSETS[:-1]] = False
    return mask


def load(directory):
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def policy_of(directory, **keys):
    return Policy(load(directory), torch.device("cpu"), torch.float32, **keys)


def packed_scores(policy, mask, *, limit, temperature=1.0):
    """Log-probabilities and entropies of contributing tokens, in the order of the batch."""
    packs = pack(OFFSETS, mask, np.arange(len(LENGTHS)), limit)
    scores = [policy.score(one, TOKENS, temperature) for one in packs if len(one.contributing)]
    order = np.argsort(np.concatenate([one.contributing for one in packs]))
    return torch.cat([score.logprobs for score in scores])[order], torch.cat([score.entropy for score in scores])[order]


def plain_scores(model, mask, temperature=1.0):
    """The same by the model's own forward, a sample at a time."""
    logprobs, entropy = [], []
    for start, end in pairwise(OFFSETS):
        ids = torch.from_numpy(TOKENS[start:end])
        everything = (model(input_ids=ids[None], use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
        wanted = torch.from_numpy(mask[start + 1 : end])
        logprobs.append(everything.gather(-1, ids[1:, None])[:, 0][wanted])
        entropy.append(torch.distributions.Categorical(logits=everything, validate_args=False).entropy()[wanted])
    return torch.cat(logprobs), torch.cat(entropy)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_tied"])
@pytest.mark.parametrize("limit", [63, 20, 1], ids=["one_pack", "several_packs", "a_pack_each"])
def test_packed_logprobs_and_entropies_equal_unpacked_ones(make_checkpoint, family, limit):
    directory = make_checkpoint(family, 0)
    mask = everything_contributes()
    for ours, theirs in zip(packed_scores(policy_of(directory), mask, limit=limit), plain_scores(load(directory), mask), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_packed_gradients_equal_unpacked_ones(make_checkpoint, family):
    directory = make_checkpoint(family, 0)
    mask = everything_contributes()
    weights = torch.randn(int(mask.sum()), generator=torch.Generator().manual_seed(1))
    policy, plain = policy_of(directory), load(directory)
    (packed_scores(policy, mask, limit=30)[0] * weights).sum().backward()
    (plain_scores(plain, mask)[0] * weights).sum().backward()
    for (name, ours), theirs in zip(policy.model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=2e-5, msg=name)


def test_logits_are_divided_by_the_temperature(tiny_qwen3):
    mask = everything_contributes()
    ours = packed_scores(policy_of(tiny_qwen3), mask, limit=63, temperature=0.7)
    for one, other in zip(ours, plain_scores(load(tiny_qwen3), mask, temperature=0.7), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=ROUNDING)


def test_temperature_0_is_scored_as_1(tiny_qwen3):
    policy, mask = policy_of(tiny_qwen3), everything_contributes()
    assert torch.equal(packed_scores(policy, mask, limit=63, temperature=0.0)[0], packed_scores(policy, mask, limit=63)[0])


def test_a_large_vocabulary_is_read_in_slices_with_the_same_scores_and_gradients(tiny_qwen3):
    whole, sliced, mask = policy_of(tiny_qwen3), policy_of(tiny_qwen3, logits_at_once=7 * VOCABULARY), everything_contributes()
    expected = packed_scores(whole, mask, limit=63)
    expected[0].sum().backward()
    found = packed_scores(sliced, mask, limit=63)
    found[0].sum().backward()
    torch.testing.assert_close(found, expected)
    for one, other in zip(whole.model.parameters(), sliced.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_the_self_test_measures_rounding_only(tiny_qwen3, tiny_llama):
    for directory in (tiny_qwen3, tiny_llama):
        assert self_test(policy_of(directory)) < 1e-5


class ScaledQwen3(Qwen3ForCausalLM):
    """A model whose output head is not all there is between hidden states and logits."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 2
        return out


def test_the_self_test_refuses_a_model_that_scales_its_logits(tiny_qwen3):
    model = ScaledQwen3.from_pretrained(tiny_qwen3)
    with pytest.raises(TrainerFailed, match="packed and unpacked"):
        self_test(Policy(model, torch.device("cpu"), torch.float32))


def test_sliding_windows_are_refused_by_name(make_checkpoint):
    config = Qwen3Config(
        vocab_size=57, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=8, intermediate_size=16
    )
    config.layer_types = ["full_attention", "sliding_attention"]
    config.sliding_window = 4
    with pytest.raises(ConfigError, match="sliding_attention"):
        Policy(AutoModelForCausalLM.from_config(config), torch.device("cpu"), torch.float32)
