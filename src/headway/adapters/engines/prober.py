"""Asks one engine for a few tokens: are its log-probabilities the processed ones, and does it sample by the weights that it was given?"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from typing import Protocol

import msgspec

from headway.adapters.engines.generation import excerpt
from headway.adapters.engines.verification import (
    PROBE_PROMPT,
    PROBE_TEMPERATURES,
    PROBE_TOKENS,
    Token,
    are_raw,
    differs_from_probe,
    not_cut,
)
from headway.errors import EngineFailed, EngineSilent, EngineUnreachable
from headway.formats.probe import Probe
from headway.types import Checkpoint, SamplingParams

_log = logging.getLogger("headway")
_BUSY_SECONDS = 5.0  # for a probe at an engine in service: it may queue behind a full batch


class OtherWeights(EngineFailed):
    """An engine samples otherwise than the weights do that it says it serves."""


class Sample(Protocol):
    """Lets an engine generate, by seed 0 and past end-of-sequence. `likeliest`: the likeliest tokens only; `adapter` "": the base model."""

    async def __call__(
        self, token_ids: Sequence[int], *, temperature: float, likeliest: bool, max_tokens: int, request_id: str, adapter: str
    ) -> list[Token]:
        """Return the tokens. Raises `EngineFailed`; msgspec.MsgspecError and ValueError for an answer that is none."""
        ...


class Prober:
    """Probes one engine; `tokens` counts what it has sampled for that."""

    def __init__(self, name: str, url: str, sample: Sample, sampling: SamplingParams, raw_remedy: str) -> None:
        self.tokens = 0
        self._engine = f"{name}: {url}"
        self._name = name
        self._sample = sample
        self._sampling = sampling
        self._raw_remedy = raw_remedy

    async def hear(self, adapter: str) -> None:
        """Raise `EngineFailed` when the log-probabilities are not those of the distribution that the run samples from."""
        at_one, at_half = [
            await self._probe(PROBE_PROMPT, temperature=temperature, likeliest=True, max_tokens=PROBE_TOKENS, adapter=adapter)
            for temperature in PROBE_TEMPERATURES
        ]
        if are_raw(at_one, at_half):
            raise EngineFailed(
                f"{self._engine} returns log-probabilities of the plain model, the same at temperatures 1 and 0.5, and not of the "
                f"distribution that it samples from: {self._raw_remedy}"
            )
        if keys := not_cut(at_one, self._sampling):
            said = "returns log-probabilities that do not account for top-p and top-k"
            raise EngineFailed(f"{self._engine} {said}: set {keys}, or use an engine that does")

    async def compare(self, probe: Probe, checkpoint: Checkpoint, adapter: str, *, busy: bool) -> None:
        """Raise `OtherWeights` when the engine samples otherwise than the checkpoint does. One that is `busy` may be too much so."""
        try:
            async with asyncio.timeout(_BUSY_SECONDS if busy else None):
                tokens = await self._probe(probe.token_ids, temperature=1.0, likeliest=False, max_tokens=1, adapter=adapter)
        except TimeoutError:
            _log.info("%s was too busy to be asked whether it samples by %s: it says so", self._name, checkpoint.label)
            return
        if wrong := differs_from_probe(probe, tokens[0]):
            raise OtherWeights(f"{self._engine} serves other weights than {checkpoint.directory}: after the probe's prompt, {wrong}")

    async def _probe(self, prompt: Sequence[int], *, temperature: float, likeliest: bool, max_tokens: int, adapter: str) -> Sequence[Token]:
        request_id = f"probe-{secrets.token_hex(6)}"
        try:
            tokens = await self._sample(
                prompt, temperature=temperature, likeliest=likeliest, max_tokens=max_tokens, request_id=request_id, adapter=adapter
            )
        except (EngineSilent, EngineUnreachable):
            raise
        except EngineFailed as error:
            raise EngineFailed(f"{error}; so it cannot be checked what it serves") from error
        except (msgspec.MsgspecError, ValueError) as error:
            said = excerpt(str(error).encode())
            raise EngineFailed(f"{self._engine} gave no usable answer to the probe of its weights: {said}") from error
        self.tokens += len(tokens)
        if not tokens:
            raise EngineFailed(f"{self._engine} sampled nothing when it was probed; so it cannot be checked what it serves")
        return tokens
