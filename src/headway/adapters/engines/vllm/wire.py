"""The generate call of vLLM's API: its JSON as typed values. No I/O."""

from __future__ import annotations

import msgspec

from headway.adapters.engines import wire
from headway.adapters.engines.generation import Ask, Dialect, Part, Span, Stamps, check_answer
from headway.adapters.engines.vllm import choices
from headway.adapters.engines.wire import Logprob

GENERATE_PATH = "/inference/v1/generate"
LABEL_PATH = "/weight_info"


class SamplingJson(wire.SamplingJson, frozen=True, kw_only=True, omit_defaults=True):
    """`sampling_params`."""

    max_tokens: int
    seed: int
    logprobs: int | None = None  # 0: of the sampled token only


class GenerateJson(msgspec.Struct, frozen=True, omit_defaults=True):
    """The request's body; `stream` is never on."""

    request_id: str
    token_ids: list[int]
    sampling_params: SamplingJson
    stream: bool | None = None
    model: str | None = None


class LogprobJson(msgspec.Struct, frozen=True, gc=False):
    """One entry of `logprobs.content`: there is one per token, and no cycle is among them for the collector to look for."""

    logprob: Logprob


class LogprobsJson(msgspec.Struct, frozen=True):
    """`logprobs` of a choice."""

    content: list[LogprobJson] | None = None


class ChoiceJson(choices.ChoiceJson[LogprobsJson], frozen=True):
    """One completion, and which weights wrote it."""

    weight_versions: list[Span] | None = None


AnswerJson = choices.AnswerJson[ChoiceJson]


class WeightInfoJson(msgspec.Struct, frozen=True):
    """Which weights an engine says it serves."""

    weight_version: str


_read = wire.reader(AnswerJson)
_decode_info = msgspec.json.Decoder(WeightInfoJson).decode


def encode_request(ask: Ask) -> bytes:
    """Return the body of a generate request."""
    sampling = SamplingJson(
        max_tokens=ask.max_tokens,
        temperature=ask.temperature,
        seed=ask.seed,
        logprobs=0,
        top_p=wire.top_p_of(ask),
        top_k=ask.top_k or None,
        stop_token_ids=list(ask.stop_token_ids),
    )
    return wire.encode(GenerateJson(ask.request_id, ask.token_ids, sampling, stream=False, model=ask.model or None))


def read_label(body: bytes) -> str:
    """Return the label that an engine says it serves (GET /weight_info, SGLang's /get_model_info). Raises msgspec.DecodeError."""
    try:
        return _decode_info(body).weight_version
    except RecursionError as error:
        raise msgspec.DecodeError("JSON is nested too deep") from error


def read_answer(body: bytes, ask: Ask, stamps: Stamps) -> Part:
    """Decode and check an answer. Raises `GenerationFailed`."""
    choice = _read(body).only()
    ids = choice.token_ids or []
    entries = (choice.logprobs.content if choice.logprobs is not None else None) or []
    logprobs = [entry.logprob for entry in entries]
    finish = check_answer(ids, logprobs, choice.finish_reason, max_tokens=ask.max_tokens)
    return Part(ids, logprobs, stamps.of(choice.weight_versions, len(ids)), finish, bool(choice.weight_versions))


GENERATE = Dialect(GENERATE_PATH, (LABEL_PATH,), encode_request, read_answer)
