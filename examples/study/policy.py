"""The policy of the study: a transformer of one layer that starts as a careless player, and learns by headway's own trainer step.

The careless player (version 0) knows the format and not the value: on fork prompts it asks the tool one time in ten, it repeats the tool's
answer half of the time and plays any digit otherwise. It is made by fitting the network to these probabilities, from random weights.
"""

from __future__ import annotations

import copy
from functools import lru_cache

import numpy as np
import torch
from game import ALPHABET, DIGITS, FIRST_DIGIT, KINDS, OPENING, TOOL, VOCABULARY, Tables, all_histories, tables_of

from headway.embedded.trainer.initialise import random_model
from headway.embedded.trainer.scoring import Policy
from headway.settings import InitSection

SHAPE = InitSection(
    architecture="qwen3",
    alphabet=ALPHABET,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=64,
    max_position_embeddings=16,
    initializer_range=0.1,
)
ASKS, REPEATS = 0.1, 0.5
FITTING_STEPS, FITTING_RATE = 250, 1e-2
ELSEWHERE = 0.02  # probability of anything that is no digit, in all
_HISTORIES = torch.from_numpy(all_histories())
_POSITIONS = torch.arange(_HISTORIES.shape[1])[None]


def new_policy(seed: int) -> Policy:
    """Return the careless player of a seed, ready to be trained."""
    return copy.deepcopy(_careless(seed))


def tables(policy: Policy) -> Tables:
    """Return what the policy does after every history, by one forward pass over all of them."""
    with torch.no_grad():
        return tables_of(_logprobs(policy).numpy())


def _logprobs(policy: Policy) -> torch.Tensor:
    hidden = policy.model.base_model(input_ids=_HISTORIES, position_ids=_POSITIONS, use_cache=False).last_hidden_state
    return policy.model.get_output_embeddings()(hidden[:, 1::2]).log_softmax(-1)


@lru_cache(maxsize=8)
def _careless(seed: int) -> Policy:
    torch.manual_seed(seed)
    model, _ = random_model(SHAPE, seed)
    policy = Policy(model, torch.device("cpu"), torch.float32)
    wanted = _wanted()
    optimiser = torch.optim.Adam(policy.model.parameters(), lr=FITTING_RATE)
    for step in range(FITTING_STEPS):
        for group in optimiser.param_groups:
            group["lr"] = FITTING_RATE * (1 - step / FITTING_STEPS)
        optimiser.zero_grad()
        (-(wanted * _logprobs(policy)).sum(-1).mean()).backward()
        optimiser.step()
    return policy


def _wanted() -> torch.Tensor:
    """Return the careless player's probabilities, float32 (histories, 3, V)."""
    digits = np.zeros(VOCABULARY)
    digits[FIRST_DIGIT : FIRST_DIGIT + DIGITS] = 1.0
    rest = 1.0 - digits
    blind = (1 - ELSEWHERE) * digits / digits.sum() + ELSEWHERE * rest / rest.sum()
    fork = (1 - ASKS) * blind
    fork[TOOL] += ASKS
    wanted = np.tile(blind, (len(_HISTORIES), 3, 1))
    ids = _HISTORIES.numpy()
    wanted[ids[:, 1] == OPENING[KINDS[0]], 0] = fork
    longs = np.arange(DIGITS * VOCABULARY)
    wanted[longs, 1:] *= 1 - REPEATS
    for turn in (1, 2):
        wanted[longs, turn, FIRST_DIGIT + longs // VOCABULARY] += REPEATS
    return torch.from_numpy(wanted.astype(np.float32))
