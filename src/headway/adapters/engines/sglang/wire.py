"""The generate call of SGLang's API: its JSON as typed values. No I/O.

Log-probabilities come as [logprob, id, text or null], and their ids must be those that were sampled. Where an answer names no
weight_versions, its one weight_version is of the last token, and the tokens are stamped by what was served before the request.
"""

from __future__ import annotations

import msgspec

from headway.adapters.engines import wire
from headway.adapters.engines.generation import (
    Ask,
    ContextExceeded,
    Dialect,
    GenerationFailed,
    Part,
    Span,
    Stamps,
    check_answer,
    excerpt,
    is_context_error,
)
from headway.adapters.engines.wire import Logprob, TokenId

GENERATE_PATH = "/generate"
LABEL_PATHS = ("/get_model_info", "/model_info")  # older and newer servers have one or both


class SamplingJson(wire.SamplingJson, frozen=True, kw_only=True, omit_defaults=True):
    """`sampling_params`."""

    max_new_tokens: int
    sampling_seed: int  # looked at by a server with --enable-deterministic-inference
    no_stop_trim: bool | None = None  # the token that ended it belongs to the sample


class GenerateJson(msgspec.Struct, frozen=True, omit_defaults=True):
    """The request's body."""

    rid: str
    input_ids: list[int]
    sampling_params: SamplingJson
    return_logprob: bool | None = None
    stream: bool | None = None
    lora_path: str | None = None  # the adapter's name


class LogprobJson(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One entry of `output_token_logprobs`: there is one per token, and no cycle is among them for the collector to look for."""

    logprob: Logprob
    token_id: TokenId
    text: str | None = None


class FinishJson(msgspec.Struct, frozen=True):
    """How a generation ended. An abort with a status is a refusal."""

    type: str
    message: str | None = None
    status_code: int | None = None


class MetaJson(msgspec.Struct, frozen=True):
    """`meta_info`, as far as it is used."""

    finish_reason: FinishJson | None = None
    output_token_logprobs: list[LogprobJson] | None = None
    weight_versions: list[Span] | None = None


class AnswerJson(msgspec.Struct, frozen=True):
    """The response's body, as far as it is used."""

    meta_info: MetaJson
    output_ids: list[TokenId] | None = None


_read = wire.reader(AnswerJson)


def encode_request(ask: Ask) -> bytes:
    """Return the body of a generate request."""
    sampling = SamplingJson(
        max_new_tokens=ask.max_tokens,
        temperature=ask.temperature,
        sampling_seed=ask.seed,
        top_p=wire.top_p_of(ask),
        top_k=ask.top_k or None,
        stop_token_ids=list(ask.stop_token_ids),
        no_stop_trim=True,
    )
    asked = GenerateJson(ask.request_id, ask.token_ids, sampling, return_logprob=True, stream=False, lora_path=ask.model or None)
    return wire.encode(asked)


def read_answer(body: bytes, ask: Ask, stamps: Stamps) -> Part:
    """Decode and check an answer. Raises `GenerationFailed`, `ContextExceeded`."""
    answer = _read(body)
    meta, ids = answer.meta_info, answer.output_ids or []
    _refuse_aborts_for_a_reason(meta.finish_reason, len(ids))
    entries = meta.output_token_logprobs or []
    logprobs = [entry.logprob for entry in entries]
    finish = check_answer(ids, logprobs, meta.finish_reason.type if meta.finish_reason else None, max_tokens=ask.max_tokens)
    if [entry.token_id for entry in entries] != ids:
        index, entry = next((index, entry) for index, entry in enumerate(entries) if entry.token_id != ids[index])
        message = f"the logprob at {index} is of token {entry.token_id}, and the token is {ids[index]}"
        raise GenerationFailed(message, cause="length_mismatch", retryable=False, sampled_tokens=len(ids))
    return Part(ids, logprobs, stamps.of(meta.weight_versions, len(ids)), finish, bool(meta.weight_versions))


def _refuse_aborts_for_a_reason(finish: FinishJson | None, count: int) -> None:
    """An abort that was asked for is continued; one by which the server refuses or fails a request is no answer."""
    if finish is None or finish.type != "abort" or finish.status_code is None:
        return
    reason = excerpt((finish.message or "").encode())
    if is_context_error(reason.encode()):
        raise ContextExceeded(reason)
    status = finish.status_code
    raise GenerationFailed(f"the server ended it with status {status}: {reason}", retryable=status >= 500, sampled_tokens=count)


GENERATE = Dialect(GENERATE_PATH, LABEL_PATHS, encode_request, read_answer)
