"""Is what an engine serves what it was given, and are its log-probabilities those of the policy? Judged by a few tokens. No I/O.

*Weights*: the sampled token after the probe's prompt must have about the log-probability that the trainer has stated for it (`Probe`).
An engine in half precision is off by some hundredths; weights of another model, or half-loaded ones, by one and more.

*Processed log-probabilities*: the loss needs those of the distribution that was sampled from: after temperature, top-k and top-p. Servers
may return those of the plain model instead. Asked for the likeliest tokens at two temperatures, the plain model's are the same twice;
others differ, or are all 0 where the distribution was cut down to the one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from math import log
from statistics import median
from typing import NamedTuple

from headway.formats.probe import Probe
from headway.types import SamplingParams

PROBE_TEMPERATURES = (1.0, 0.5)
PROBE_TOKENS = 8
PROBE_PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)  # in any vocabulary; too short for a block of a prefix cache
_ABSOLUTE, _RELATIVE = 0.15, 0.05
_SAME = 0.02  # half precision may differ from run to run
_TELLING = -0.05  # a token nearer to certainty looks alike at both temperatures
_NOT_CUT = -0.01
_TIES = tuple(-log(tied) for tied in range(2, 9))  # what a cut leaves where logits are equal, which half precision makes them
_TIED = 1e-3


class Token(NamedTuple):
    """A token that an engine has sampled, and the log-probability that it gave it."""

    id: int
    logprob: float


def differs_from_probe(probe: Probe, token: Token) -> str:
    """Say how a token sampled after the probe's prompt contradicts it, for people; empty: it does not."""
    if not 0 <= token.id < len(probe.logprobs):
        return f"it sampled token {token.id}, and the weights have {len(probe.logprobs)}"
    stated = float(probe.logprobs[token.id])
    if abs(token.logprob - stated) <= _ABSOLUTE + _RELATIVE * abs(stated):
        return ""
    return f"token {token.id} has log-probability {token.logprob:.3f} there, and {stated:.3f} by the weights it was given"


def are_raw(at_one: Sequence[Token], at_half: Sequence[Token]) -> bool:
    """Whether two answers at the two temperatures, of the likeliest tokens each, show that the temperature was left out of account."""
    same = list(takewhile(lambda pair: pair[0].id == pair[1].id, zip(at_one, at_half, strict=False)))
    same = [pair for pair in same if not all(_is_tied(token.logprob) for token in pair)]
    telling = [abs(one.logprob - half.logprob) for one, half in same if min(one.logprob, half.logprob) < _TELLING]
    return bool(telling) and median(telling) <= _SAME


def not_cut(at_one: Sequence[Token], sampling: SamplingParams) -> str:
    """Name the keys of a run that an engine does not account for: it scales by the temperature, and forgets what top-k and top-p cut off.

    Empty: it accounts for all, or they are off.
    """
    if all(token.logprob >= _NOT_CUT or _is_tied(token.logprob) for token in at_one):
        return ""
    wanted = ["rollout.top_p = 1"] * (sampling.top_p < 1.0) + ["rollout.top_k = 0"] * (sampling.top_k > 0)
    return " and ".join(wanted)


def _is_tied(logprob: float) -> bool:
    """Whether it is that of one of a few tokens that are equally likely, all others cut off: the same at each temperature."""
    return any(abs(logprob - tie) <= _TIED for tie in _TIES)
