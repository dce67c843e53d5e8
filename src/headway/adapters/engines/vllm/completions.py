"""The completions call of vLLM's API, for servers without the token-in, token-out one: exact ids and log-probabilities, but no versions.

Its tokens are stamped with the label that was served before the request (`generation.Stamps`). No I/O.
"""

from __future__ import annotations

import msgspec

from headway.adapters.engines.generation import Ask, Dialect, GenerationFailed, Part, Stamps, TokenId, check_answer, excerpt
from headway.adapters.engines.vllm.wire import LABEL_PATH
from headway.formats.bounded import brief

COMPLETIONS_PATH = "/v1/completions"


class CompletionJson(msgspec.Struct, frozen=True, omit_defaults=True):
    """The request's body; what is off is left out. `return_token_ids`: text is never turned into ids."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int
    logprobs: int | None = None  # 0: of the sampled token only
    return_token_ids: bool | None = None
    stream: bool | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_token_ids: list[int] = []
    model: str | None = None


class LogprobsJson(msgspec.Struct, frozen=True):
    """`logprobs` of a choice."""

    token_logprobs: list[float] | None = None


class ChoiceJson(msgspec.Struct, frozen=True):
    """One completion."""

    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    logprobs: LogprobsJson | None = None


class AnswerJson(msgspec.Struct, frozen=True):
    """The response's body, as far as it is used."""

    choices: list[ChoiceJson]


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AnswerJson).decode


def encode_request(ask: Ask) -> bytes:
    """Return the body of a completions request."""
    return _encode(
        CompletionJson(
            ask.request_id,
            ask.token_ids,
            ask.max_tokens,
            ask.temperature,
            ask.seed,
            logprobs=0,
            return_token_ids=True,
            stream=False,
            top_p=ask.top_p if ask.top_p < 1.0 else None,
            top_k=ask.top_k or None,
            stop_token_ids=list(ask.stop_token_ids),
            model=ask.model or None,
        )
    )


def read_answer(body: bytes, ask: Ask, stamps: Stamps) -> Part:
    """Decode and check an answer. Raises `GenerationFailed`."""
    try:
        answer = _decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GenerationFailed(f"the answer cannot be read ({brief(error)}): {excerpt(body)}") from None
    if len(answer.choices) != 1:
        raise GenerationFailed(f"the answer holds {len(answer.choices)} choices instead of one")
    choice = answer.choices[0]
    logprobs = (choice.logprobs.token_logprobs if choice.logprobs is not None else None) or []
    if choice.token_ids is None and logprobs:
        raise GenerationFailed("the answer has no token_ids: this server's /v1/completions knows no return_token_ids", retryable=False)
    ids = choice.token_ids or []
    finish = check_answer(ids, logprobs, choice.finish_reason, max_tokens=ask.max_tokens)
    return Part(ids, logprobs, stamps.of(None, len(ids)), finish, named=False)


COMPLETIONS = Dialect(COMPLETIONS_PATH, (LABEL_PATH,), encode_request, read_answer)
