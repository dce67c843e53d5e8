"""The game of the study: the first token of a rollout chooses a short or a long line of play, and the long one is worth more.

A digit 0-7 is hidden. Every rollout is three turns of one token each, so that every line of play costs the same tokens.

    fork prompt  "<bos>?"   first token `t`: the tool is asked, and answers with the hidden digit, after its delay (the LONG line);
                            the reward is the share of the two guesses that follow that are right: up to 1.
                            anything else: a blind guess, and two more (the SHORT line); the reward is 1 if one of the three hits: at
                            most 3/8, by three different digits.
    plain prompt "<bos>!"   there is no tool: three blind guesses. Nobody is slow here; these groups keep versions moving while slow
                            ones are awaited.

The game is so small that all histories fit into tables: what a policy would do after each is known exactly, and so is its expected reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

DIGITS = 8
ALPHABET = "01234567t?!."
SPECIALS = 3  # <pad>, <bos>, <eos>
VOCABULARY = SPECIALS + len(ALPHABET)
BOS = 1
ID = {character: SPECIALS + place for place, character in enumerate(ALPHABET)}
FIRST_DIGIT, TOOL, NOTHING = ID["0"], ID["t"], ID["."]

Kind = Literal["fork", "plain"]
KINDS: tuple[Kind, ...] = ("fork", "plain")
OPENING = {"fork": ID["?"], "plain": ID["!"]}
TURNS = 3
FORKS, PLAINS = 3, 2  # prompts with each hidden digit
FORK_SHARE = FORKS / (FORKS + PLAINS)
PROMPTS = DIGITS * (FORKS + PLAINS)

Table = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Tables:
    """Log-probabilities of the next token (last axis, V) after every history; float64.

    `first` (kind, V); `long_second` (hidden, V); `long_third` (hidden, second token, V); `blind_second` (kind, first token, V);
    `blind_third` (kind, first token, second token, V).
    """

    first: Table
    long_second: Table
    long_third: Table
    blind_second: Table
    blind_third: Table

    def after(self, kind: Kind, hidden: int, tokens: tuple[int, ...]) -> Table:
        """Return the log-probabilities (V) of the next token of a game in which `tokens` were sampled so far."""
        place = KINDS.index(kind)
        found: Table
        if not tokens:
            found = self.first[place]
        elif is_long(kind, tokens):
            found = self.long_second[hidden] if len(tokens) == 1 else self.long_third[hidden, tokens[1]]
        else:
            found = self.blind_second[place, tokens[0]] if len(tokens) == 1 else self.blind_third[place, tokens[0], tokens[1]]
        return found

    @property
    def p_long(self) -> float:
        """The probability that a fork prompt is played along the long line."""
        return float(np.exp(self.first[0, TOOL]))

    @cached_property
    def value(self) -> float:
        """The expected reward over all prompts."""
        return FORK_SHARE * self.fork_value + (1 - FORK_SHARE) * float(self._blind(1).mean())

    @cached_property
    def fork_value(self) -> float:
        """The expected reward of a fork prompt."""
        hidden = np.arange(DIGITS)
        second, third = np.exp(self.long_second), np.exp(self.long_third)
        right = FIRST_DIGIT + hidden
        copied = second[hidden, right] + np.einsum("hv,hv->h", second, third[hidden, :, right])
        return float(self.p_long * copied.mean() / 2 + self._blind(0).mean())

    def _blind(self, place: int) -> Table:
        """Expected reward of the short line, by hidden digit, times its probability (a fork prompt's first `t` is not blind)."""
        first, second, third = (np.exp(table[place]) for table in (self.first, self.blind_second, self.blind_third))
        if place == 0:
            first = first.copy()
            first[TOOL] = 0.0
        rewards = []
        for right in range(FIRST_DIGIT, FIRST_DIGIT + DIGITS):
            missed = 1.0 - third[:, :, right]
            missed[right, :] = 0.0
            missed[:, right] = 0.0
            rewards.append(first.sum() - np.einsum("x,xy,xy->", first, second, missed))
        return np.array(rewards)


def dealt(number: int) -> tuple[Kind, int]:
    """Return the kind and the hidden digit of a prompt by its number, 0..PROMPTS - 1."""
    hidden, copy = divmod(number, FORKS + PLAINS)
    return KINDS[copy >= FORKS], hidden


def is_long(kind: Kind, tokens: tuple[int, ...]) -> bool:
    """Whether the game whose sampled tokens begin like this goes along the long line."""
    return kind == "fork" and tokens[:1] == (TOOL,)


def reward(kind: Kind, hidden: int, tokens: tuple[int, ...]) -> float:
    """Return the reward of a finished game."""
    right = FIRST_DIGIT + hidden
    if is_long(kind, tokens):
        return sum(token == right for token in tokens[1:]) / (TURNS - 1)
    return float(right in tokens)


def conversation(kind: Kind, hidden: int, tokens: tuple[int, ...]) -> tuple[list[int], list[bool]]:
    """Return the token ids of a game so far, what the environment said included, and which of them were sampled."""
    ids, sampled = [BOS, OPENING[kind]], [False, False]
    for turn, token in enumerate(tokens):
        ids.append(token)
        sampled.append(True)
        if turn < TURNS - 1:
            ids.append(FIRST_DIGIT + hidden if turn == 0 and is_long(kind, tokens) else NOTHING)
            sampled.append(False)
    return ids, sampled


def all_histories() -> npt.NDArray[np.int64]:
    """Return the token ids (histories, 6) before every third turn; their prefixes are the histories before the first and the second.

    In the order of `Tables`: the long line by (hidden, second token), then blind play by (kind, first token, second token).
    """
    long = [conversation("fork", hidden, (TOOL, second))[0] for hidden in range(DIGITS) for second in range(VOCABULARY)]
    blind = [
        [BOS, OPENING[kind], first, NOTHING, second, NOTHING]
        for kind in KINDS
        for first in range(VOCABULARY)
        for second in range(VOCABULARY)
    ]
    return np.array(long + blind, dtype=np.int64)


def tables_of(logprobs: npt.NDArray[np.floating]) -> Tables:
    """Build the tables from log-probabilities (histories, 3, V) of the next token after 2, 4 and 6 tokens of `all_histories()`."""
    every = logprobs.astype(np.float64)
    longs = DIGITS * VOCABULARY
    long = every[:longs].reshape(DIGITS, VOCABULARY, TURNS, VOCABULARY)
    blind = every[longs:].reshape(len(KINDS), VOCABULARY, VOCABULARY, TURNS, VOCABULARY)
    return Tables(blind[:, 0, 0, 0], long[:, 0, 1], long[:, :, 2], blind[:, :, 0, 1], blind[:, :, :, 2])
