"""What a generation is asked for and comes to, whatever protocol carries it, and what makes an engine's answer usable. No I/O.

A usable answer has one finite log-probability per token and version spans that cover its tokens exactly, each labelled
"<lineage>-<version>" by this run. Anything else is refused by name: an answer is never padded, cut or guessed at. Which ids are in the
model's vocabulary only the engine knows (models have more of them than their tokenizers); here an id is refused that fits no int32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from headway.errors import EngineFailed, HeadwayError
from headway.types import Cause

MOST_ANSWER_BYTES = 1024**2  # of an answer without tokens
MOST_TOKEN_BYTES = 4096  # of each: its id, its log-probability, its text

_MOST_VERSION_DIGITS = 9  # int32 holds it
_MOST_LABELS_KNOWN = 64  # engines serve a few at a time, and a long run has one for each of its steps
_LONGEST_EXAMINED = 1024**2  # bytes of a refusal
_CONTEXT = re.compile(rb"\bcontext\b|maximum.model.len|max_model_len|longer than the maximum", re.IGNORECASE)
_CONTEXT_LENGTH = re.compile(rb"(?:context|model) length (?:is |of |\()(\d{1,9})\b", re.IGNORECASE)

Finish = Literal["stop", "length", "abort"]


class GenerationFailed(EngineFailed):
    """A generation brought nothing usable. `sampled_tokens`: what the engine had written by then, and is lost.

    `lost`: the engine may be gone, or serve other weights than this run's: the generation can go on at another one.
    """

    def __init__(
        self, message: str, *, cause: Cause = "engine_error", retryable: bool = True, sampled_tokens: int = 0, lost: bool = False
    ) -> None:
        super().__init__(message)
        self.cause: Cause = cause
        self.retryable = retryable
        self.sampled_tokens = sampled_tokens
        self.lost = lost


class ContextExceeded(HeadwayError):
    """The prompt does not fit the engine's context."""


class Generated(NamedTuple):
    """What an engine wrote: lists of equal length, and `spans` (start, version), run-length over the tokens, versions changing."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int]]
    finish: Literal["stop", "length"]


class Ask(msgspec.Struct, frozen=True, gc=False):
    """One request. `request_id` is unique per sending; `model`: a LoRA adapter's name, empty: the base model."""

    request_id: str
    token_ids: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop_token_ids: Sequence[int] = ()
    model: str = ""


class Part(NamedTuple):
    """One usable answer. `spans`: (start, version), run-length over its tokens; `finish` "abort" asks to be continued.

    `named`: whether the engine has named the versions itself.
    """

    token_ids: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int]]
    finish: Finish
    named: bool = True


class Span(msgspec.Struct, frozen=True, gc=False):
    """Tokens `start` to `end` (excluded) of an answer were written under weights labelled `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Stamps:
    """How the tokens of an answer are stamped: by the spans that it names; else by `oldest`.

    `oldest`: the label that the engine served before the request was sent; at worst older than what wrote the tokens, so staleness is never
    under-reported. `fixed`: the version of the LoRA adapter that was asked for by name, which wrote all tokens, whatever the spans say:
    they speak of the base model.
    """

    versions: Labels
    oldest: str | None = None
    fixed: int | None = None

    def of(self, spans: list[Span] | None, length: int) -> list[tuple[int, int]]:
        """Return (start, version) over `length` tokens. Raises `GenerationFailed`."""
        if not length:
            return []
        if self.fixed is not None:
            return [(0, self.fixed)]
        if not spans and self.oldest is not None:
            return [(0, self.versions.version(self.oldest))]
        if not spans:
            raise GenerationFailed(
                "the answer has no weight_versions, and the engine says nowhere which weights it serves: nobody knows which ones wrote its "
                "tokens: use an engine that reports them",
                retryable=False,
                sampled_tokens=length,
            )
        found: list[tuple[int, int]] = []
        at = 0
        for span in spans:
            if span.start != at or span.end <= at:
                break
            found.append((span.start, self.versions.version(span.version)))
            at = span.end
        if at != length or len(found) != len(spans):
            told = excerpt(", ".join(f"{span.start}-{span.end}" for span in spans[:8]).encode())
            raise GenerationFailed(f"weight_versions cover {told} of {length} tokens: not each token exactly once", sampled_tokens=length)
        return found


class Dialect(NamedTuple):
    """One call of one protocol. `read(body, ask, stamps)` checks an answer; `label_paths`: where the served label is asked for, in turn."""

    path: str
    label_paths: tuple[str, ...]
    encode: Callable[[Ask], bytes]
    read: Callable[[bytes, Ask, Stamps], Part]


def check_answer(ids: list[int], logprobs: list[float], finish: str | None, *, max_tokens: int) -> Finish:
    """Return how a generation of at most `max_tokens` tokens ended. Raises `GenerationFailed` where its answer is not usable.

    That each number is an id, or the logarithm of a probability, was found when it was decoded (`wire`).
    """
    count = len(ids)
    if finish not in {"stop", "length", "abort"}:
        said = excerpt(repr(finish).encode())
        raise GenerationFailed(f"the answer ended with finish_reason {said}: not a complete generation", sampled_tokens=count)
    if count > max_tokens:
        raise GenerationFailed(f"{count} tokens came back where at most {max_tokens} were asked for", sampled_tokens=count)
    if len(logprobs) != count:
        message = f"{len(logprobs)} logprobs for {count} token ids"
        raise GenerationFailed(message, cause="length_mismatch", retryable=False, sampled_tokens=count)
    return finish  # type: ignore[return-value]  # checked above


def is_context_error(body: bytes) -> bool:
    """Whether a 400 says that the request does not fit the engine's context."""
    return _CONTEXT.search(body, 0, _LONGEST_EXAMINED) is not None


def context_in(body: bytes) -> int | None:
    """Return how many tokens the engine's context holds, where a 400 says so."""
    found = _CONTEXT_LENGTH.search(body, 0, _LONGEST_EXAMINED)
    return int(found[1]) if found else None


def excerpt(body: bytes, limit: int = 200) -> str:
    """Return the start of a response body as one line, for people."""
    text = " ".join(body[: 4 * limit].decode("utf-8", "replace").split())
    return text if len(text) <= limit else text[:limit] + "..."


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
        version = self.find(label)
        if version is None:
            said = f'the engine serves weights labelled "{label[:80]}", which are not of this run ("{self._prefix}<n>")'
            raise GenerationFailed(said, lost=True)
        if len(self._known) >= _MOST_LABELS_KNOWN:
            self._known.clear()
        self._known[label] = version
        return version

    def find(self, label: str) -> int | None:
        """Return the version that a label of this lineage names, None for any other label."""
        number = label.removeprefix(self._prefix)
        is_number = number.isascii() and number.isdigit() and len(number) <= _MOST_VERSION_DIGITS and (number == "0" or number[0] != "0")
        return int(number) if is_number and number != label else None
