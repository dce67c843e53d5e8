"""What the JSON of all protocols has in common: how sampling is asked for, and how an answer is decoded. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from headway.adapters.engines.generation import Ask, GenerationFailed, excerpt
from headway.formats.bounded import brief

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
# A probability is at most 1, and half-precision engines round; float32 holds the least. JSON has no NaN and no infinity.
Logprob = Annotated[float, Meta(ge=-1e30, le=0.25)]

encode = msgspec.json.Encoder().encode

T = TypeVar("T")


class SamplingJson(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn; what is off is left out."""

    temperature: float
    top_p: float | None = None
    top_k: int | None = None
    stop_token_ids: list[int] = []


def top_p_of(ask: Ask) -> float | None:
    """Return it; None where it is off."""
    return ask.top_p if ask.top_p < 1.0 else None


def reader(shape: type[T]) -> Callable[[bytes], T]:
    """Return what decodes bodies of this shape. It raises `GenerationFailed` for every other."""
    decode = msgspec.json.Decoder(shape).decode

    def read(body: bytes) -> T:
        try:
            return decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise GenerationFailed(f"the answer cannot be read ({brief(error)}): {excerpt(body)}") from None

    return read
