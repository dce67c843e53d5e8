"""What goes over the wire: the part of vLLM's token-in, token-out API that the engine speaks. Unknown keys are ignored, as vLLM does."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headway.embedded.engine.request import Request

REQUEST_PREFIX = "generate-tokens-"  # vLLM puts it before every id that a client sends


class SamplingParameters(msgspec.Struct, frozen=True):
    """How to sample.

    `max_tokens` unset fills the context; `top_k` -1 or 0: off; `logprobs`: any number asks for those of the sampled tokens.
    """

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    seed: int | None = None
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False


class GenerateRequest(msgspec.Struct, frozen=True):
    """Body of POST /inference/v1/generate."""

    token_ids: Annotated[list[int], Meta(min_length=1)]
    sampling_params: SamplingParameters = SamplingParameters()
    request_id: str | None = None
    model: str | None = None
    stream: bool = False


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability of one sampled token in the processed distribution."""

    token_id: int
    logprob: float


class Logprobs(msgspec.Struct, frozen=True):
    """Aligned with the output's token ids."""

    content: list[TokenLogprob]


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were sampled while the label `version` was served."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct, frozen=True):
    """The output. `stop_reason`: the stop id that ended it, null for end-of-sequence."""

    index: int
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | None
    logprobs: Logprobs | None
    weight_versions: list[VersionSpan]


class GenerateResponse(msgspec.Struct, frozen=True):
    """Answer of POST /inference/v1/generate."""

    request_id: str
    choices: list[Choice]


class AbortRequest(msgspec.Struct, frozen=True):
    """Body of POST /inference/v1/abort_requests; ids as the server returned them, prefix included."""

    request_ids: list[str]


class CollectiveRpc(msgspec.Struct, frozen=True):
    """Body of POST /collective_rpc."""

    method: str
    kwargs: dict[str, Any] = {}


class NewVersion(msgspec.Struct, frozen=True):
    """Body of POST /update_weight_version."""

    new_version: str


_encoder = msgspec.json.Encoder()


def encode(value: object) -> bytes:
    """Return JSON; a float that is not finite becomes null."""
    return _encoder.encode(value)


def generated(request: Request, *, request_id: str, with_logprobs: bool, eos_ids: tuple[int, ...]) -> bytes:
    """Return the JSON answer for an ended request."""
    ids = request.token_ids
    stop = ids[-1] if request.finish_reason == "stop" and ids[-1] not in eos_ids else None
    logprobs = Logprobs([TokenLogprob(*pair) for pair in zip(ids, request.logprobs, strict=True)]) if with_logprobs else None
    spans = [VersionSpan(*span) for span in request.stamped_spans()]
    return _encoder.encode(GenerateResponse(request_id, [Choice(0, ids, request.finish_reason or "error", stop, logprobs, spans)]))
