"""The generate call of vLLM's API: its JSON as typed values, and what makes an answer usable. No I/O.

A usable answer has one finite log-probability per token and version spans that cover its tokens exactly, each labelled
"<lineage>-<version>" by this run. Anything else is refused by name: an answer is never padded, cut or guessed at.
"""

from __future__ import annotations

import re
from math import isfinite
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from headway.errors import EngineFailed
from headway.formats.bounded import brief
from headway.types import Cause

GENERATE_PATH = "/inference/v1/generate"
MOST_LABEL_BYTES = 1024**2
MOST_ANSWER_BYTES = 1024**2  # of an answer without tokens
MOST_TOKEN_BYTES = 4096  # of each: its id, its log-probability, its text

_HIGHEST_LOGPROB = 0.25  # a probability is at most 1, and half-precision engines round
_LOWEST_LOGPROB = -1e30  # float32 holds it
_MOST_VERSION_DIGITS = 9  # int32 holds it
_MOST_LABELS_KNOWN = 64  # engines serve a few at a time, and a long run has one for each of its steps


class GenerationFailed(EngineFailed):
    """A generation brought nothing usable. `sampled_tokens`: what the engine had written by then, and is lost."""

    def __init__(self, message: str, *, cause: Cause = "engine_error", retryable: bool = True, sampled_tokens: int = 0) -> None:
        super().__init__(message)
        self.cause: Cause = cause
        self.retryable = retryable
        self.sampled_tokens = sampled_tokens


class SamplingJson(msgspec.Struct, frozen=True, omit_defaults=True):
    """`sampling_params`; what is off is left out."""

    max_tokens: int
    temperature: float
    seed: int
    logprobs: int | None = None  # 0: of the sampled token only
    top_p: float | None = None
    top_k: int | None = None
    stop_token_ids: list[int] = []


class GenerateJson(msgspec.Struct, frozen=True):
    """The request's body."""

    request_id: str
    token_ids: list[int]
    sampling_params: SamplingJson
    stream: bool = False


class LogprobJson(msgspec.Struct, frozen=True):
    """One entry of `logprobs.content`."""

    logprob: float


class LogprobsJson(msgspec.Struct, frozen=True):
    """`logprobs` of a choice."""

    content: list[LogprobJson] | None = None


class SpanJson(msgspec.Struct, frozen=True):
    """Tokens `start` to `end` (excluded) of the answer were written under weights labelled `version`."""

    version: str
    start: int
    end: int


class ChoiceJson(msgspec.Struct, frozen=True):
    """One completion."""

    token_ids: list[Annotated[int, Meta(ge=0, le=2**31 - 1)]] | None = None
    finish_reason: str | None = None
    logprobs: LogprobsJson | None = None
    weight_versions: list[SpanJson] | None = None


class AnswerJson(msgspec.Struct, frozen=True):
    """The response's body, as far as it is used."""

    choices: list[ChoiceJson]


class WeightInfoJson(msgspec.Struct, frozen=True):
    """Which weights an engine says it serves."""

    weight_version: str


class Part(NamedTuple):
    """One usable answer. `spans`: (start, version), run-length over its tokens; `finish` "abort" asks to be continued.

    `named`: whether the engine has named the versions itself.
    """

    token_ids: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int]]
    finish: Literal["stop", "length", "abort"]
    named: bool = True


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AnswerJson).decode
_decode_info = msgspec.json.Decoder(WeightInfoJson).decode
_CONTEXT = re.compile(rb"\bcontext\b|maximum.model.len|max_model_len|longer than the maximum", re.IGNORECASE)


def encode_request(request: GenerateJson) -> bytes:
    """Return the body of a generate request."""
    return _encode(request)


def is_context_error(body: bytes) -> bool:
    """Whether a 400 says that the prompt does not fit the engine's context."""
    return _CONTEXT.search(body, 0, MOST_LABEL_BYTES) is not None


def excerpt(body: bytes, limit: int = 200) -> str:
    """Return the start of a response body as one line, for people."""
    text = " ".join(body[: 4 * limit].decode("utf-8", "replace").split())
    return text if len(text) <= limit else text[:limit] + "..."


def read_label(body: bytes) -> str:
    """Return the label in the body of GET /weight_info. Raises msgspec.DecodeError."""
    try:
        return _decode_info(body).weight_version
    except RecursionError as error:
        raise msgspec.DecodeError("JSON is nested too deep") from error


def read_answer(body: bytes, *, max_tokens: int, versions: Labels, oldest: str | None = None) -> Part:
    """Decode and check an answer to a request for at most `max_tokens` tokens. Raises `GenerationFailed`.

    `oldest`: the label that the engine served before the request was sent. An answer that names no versions gets it as its one stamp: at
    worst older than what wrote the tokens, so staleness is never under-reported.
    """
    try:
        answer = _decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GenerationFailed(f"the answer cannot be read ({brief(error)}): {excerpt(body)}") from None
    if len(answer.choices) != 1:
        raise GenerationFailed(f"the answer holds {len(answer.choices)} choices instead of one")
    choice = answer.choices[0]
    ids = choice.token_ids or []
    finish = choice.finish_reason
    if finish not in {"stop", "length", "abort"}:
        raise GenerationFailed(f"the answer ended with finish_reason {finish!r}: not a complete generation", sampled_tokens=len(ids))
    if len(ids) > max_tokens:
        raise GenerationFailed(f"{len(ids)} tokens came back where at most {max_tokens} were asked for", sampled_tokens=len(ids))
    entries = (choice.logprobs.content if choice.logprobs is not None else None) or []
    if len(entries) != len(ids):
        raise GenerationFailed(
            f"{len(entries)} logprobs for {len(ids)} token ids", cause="length_mismatch", retryable=False, sampled_tokens=len(ids)
        )
    logprobs = [entry.logprob for entry in entries]
    if not isfinite(sum(logprobs)):
        raise GenerationFailed("a logprob is not finite", sampled_tokens=len(ids))
    if logprobs and not (min(logprobs) >= _LOWEST_LOGPROB and max(logprobs) <= _HIGHEST_LOGPROB):
        raise GenerationFailed(f"a logprob is {max(logprobs):g}, another {min(logprobs):g}: no probabilities", sampled_tokens=len(ids))
    return Part(ids, logprobs, _spans(choice.weight_versions, len(ids), versions, oldest), finish, bool(choice.weight_versions))  # type: ignore[arg-type]  # checked above


def _spans(spans: list[SpanJson] | None, length: int, versions: Labels, oldest: str | None) -> list[tuple[int, int]]:
    if not length:
        return []
    if not spans and oldest is not None:
        return [(0, versions.version(oldest))]
    if not spans:
        raise GenerationFailed(
            "the answer has no weight_versions, and the engine's /weight_info names none, so nobody knows which weights wrote its tokens: "
            "use an engine that reports them",
            retryable=False,
            sampled_tokens=length,
        )
    found: list[tuple[int, int]] = []
    at = 0
    for span in spans:
        if span.start != at or span.end <= at:
            break
        found.append((span.start, versions.version(span.version)))
        at = span.end
    if at != length or len(found) != len(spans):
        told = ", ".join(f"{span.start}-{span.end}" for span in spans[:8])
        raise GenerationFailed(f"weight_versions cover {told} of {length} tokens: not each token exactly once", sampled_tokens=length)
    return found


class Labels:
    """Reads version labels, "<lineage>-<n>", of one lineage."""

    def __init__(self, lineage: str) -> None:
        self._prefix = lineage + "-"
        self._known: dict[str, int] = {}

    def version(self, label: str) -> int:
        """Return the version that a label of this lineage names. Raises `GenerationFailed` for any other label."""
        known = self._known.get(label)
        if known is not None:
            return known
        number = label.removeprefix(self._prefix)
        is_number = number.isascii() and number.isdigit() and len(number) <= _MOST_VERSION_DIGITS and (number == "0" or number[0] != "0")
        if number == label or not is_number:
            raise GenerationFailed(f'the engine serves weights labelled "{label[:80]}", which are not of this run ("{self._prefix}<n>")')
        if len(self._known) >= _MOST_LABELS_KNOWN:
            self._known.clear()
        self._known[label] = version = int(number)
        return version
