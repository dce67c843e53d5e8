"""The completions call of vLLM's API, for servers without the token-in, token-out one: exact ids and log-probabilities, but no versions.

Its tokens are stamped with the label that was served before the request (`generation.Stamps`). What a request leaves out is filled in by
the model's own generation_config.json here, and not by what is neutral as at the token-in, token-out call: all of it is said. No I/O.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headway.adapters.engines import wire
from headway.adapters.engines.generation import Ask, Dialect, GenerationFailed, Part, Stamps, check_answer
from headway.adapters.engines.vllm.choices import AnswerJson, ChoiceJson
from headway.adapters.engines.vllm.wire import LABEL_PATH, SamplingJson
from headway.adapters.engines.wire import Logprob

COMPLETIONS_PATH = "/v1/completions"


class CompletionJson(SamplingJson, frozen=True, kw_only=True, omit_defaults=True):
    """The request's body. `return_token_ids`: text is never turned into ids."""

    request_id: str
    prompt: list[int]
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    model: str | None = None


class LogprobsJson(msgspec.Struct, frozen=True):
    """`logprobs` of a choice."""

    token_logprobs: list[Logprob] | None = None


NEUTRAL: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""What a server is to sample by, beside the temperature, where nothing else is asked for."""

_read = wire.reader(AnswerJson[ChoiceJson[LogprobsJson]])


def encode_request(ask: Ask) -> bytes:
    """Return the body of a completions request."""
    return wire.encode(
        CompletionJson(
            request_id=ask.request_id,
            prompt=ask.token_ids,
            max_tokens=ask.max_tokens,
            temperature=ask.temperature,
            seed=ask.seed,
            logprobs=0,
            return_token_ids=True,
            stream=False,
            stop_token_ids=list(ask.stop_token_ids),
            **(NEUTRAL | {"top_p": ask.top_p, "top_k": ask.top_k}),
            model=ask.model or None,
        )
    )


def read_answer(body: bytes, ask: Ask, stamps: Stamps) -> Part:
    """Decode and check an answer. Raises `GenerationFailed`."""
    choice = _read(body).only()
    logprobs = (choice.logprobs.token_logprobs if choice.logprobs is not None else None) or []
    if choice.token_ids is None and logprobs:
        raise GenerationFailed("the answer has no token_ids: this server's /v1/completions knows no return_token_ids", retryable=False)
    ids = choice.token_ids or []
    finish = check_answer(ids, logprobs, choice.finish_reason, max_tokens=ask.max_tokens)
    return Part(ids, logprobs, stamps.of(None, len(ids)), finish, named=False)


COMPLETIONS = Dialect(COMPLETIONS_PATH, (LABEL_PATH,), encode_request, read_answer)
