"""The generate call of vLLM's API: its JSON as typed values. No I/O."""

from __future__ import annotations

import msgspec

from headway.adapters.engines.generation import (
    Ask,
    Dialect,
    GenerationFailed,
    Part,
    Span,
    Stamps,
    TokenId,
    check_answer,
    excerpt,
)
from headway.formats.bounded import brief

GENERATE_PATH = "/inference/v1/generate"
LABEL_PATH = "/weight_info"


class SamplingJson(msgspec.Struct, frozen=True, omit_defaults=True):
    """`sampling_params`; what is off is left out."""

    max_tokens: int
    temperature: float
    seed: int
    logprobs: int | None = None  # 0: of the sampled token only
    top_p: float | None = None
    top_k: int | None = None
    stop_token_ids: list[int] = []


class GenerateJson(msgspec.Struct, frozen=True, omit_defaults=True):
    """The request's body; `stream` is never on."""

    request_id: str
    token_ids: list[int]
    sampling_params: SamplingJson
    stream: bool | None = None
    model: str | None = None


class LogprobJson(msgspec.Struct, frozen=True, gc=False):
    """One entry of `logprobs.content`: there is one per token, and no cycle is among them for the collector to look for."""

    logprob: float


class LogprobsJson(msgspec.Struct, frozen=True):
    """`logprobs` of a choice."""

    content: list[LogprobJson] | None = None


class ChoiceJson(msgspec.Struct, frozen=True):
    """One completion."""

    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    logprobs: LogprobsJson | None = None
    weight_versions: list[Span] | None = None


class AnswerJson(msgspec.Struct, frozen=True):
    """The response's body, as far as it is used."""

    choices: list[ChoiceJson]


class WeightInfoJson(msgspec.Struct, frozen=True):
    """Which weights an engine says it serves."""

    weight_version: str


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AnswerJson).decode
_decode_info = msgspec.json.Decoder(WeightInfoJson).decode


def encode_request(ask: Ask) -> bytes:
    """Return the body of a generate request."""
    top_p = ask.top_p if ask.top_p < 1.0 else None
    sampling = SamplingJson(ask.max_tokens, ask.temperature, ask.seed, 0, top_p, ask.top_k or None, list(ask.stop_token_ids))
    return _encode(GenerateJson(ask.request_id, ask.token_ids, sampling, stream=False, model=ask.model or None))


def read_label(body: bytes) -> str:
    """Return the label that an engine says it serves (GET /weight_info, SGLang's /get_model_info). Raises msgspec.DecodeError."""
    try:
        return _decode_info(body).weight_version
    except RecursionError as error:
        raise msgspec.DecodeError("JSON is nested too deep") from error


def read_answer(body: bytes, ask: Ask, stamps: Stamps) -> Part:
    """Decode and check an answer. Raises `GenerationFailed`."""
    try:
        answer = _decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GenerationFailed(f"the answer cannot be read ({brief(error)}): {excerpt(body)}") from None
    if len(answer.choices) != 1:
        raise GenerationFailed(f"the answer holds {len(answer.choices)} choices instead of one")
    choice = answer.choices[0]
    ids = choice.token_ids or []
    entries = (choice.logprobs.content if choice.logprobs is not None else None) or []
    logprobs = [entry.logprob for entry in entries]
    finish = check_answer(ids, logprobs, choice.finish_reason, max_tokens=ask.max_tokens)
    return Part(ids, logprobs, stamps.of(choice.weight_versions, len(ids)), finish, bool(choice.weight_versions))


GENERATE = Dialect(GENERATE_PATH, (LABEL_PATH,), encode_request, read_answer)
