"""The two protocols of the fake engine as values: what a generate call asks for, and its answer as vLLM and as SGLang write it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.testing.engine.generation import Written
from headway.testing.engine.script import Reply, logprob_of

VLLM_PATH = "/inference/v1/generate"
SGLANG_PATH = "/generate"
GENERATIONS = (VLLM_PATH, SGLANG_PATH)
NAMES = ("session", "request_id", "purpose", "group", "member", "attempt", "turn", "seed", "max_tokens")
_NAMED = re.compile(r"(train|eval)-(\d+)-(\d+)-(\d+)-(\d+)(?:-|$)")


@dataclass(frozen=True)
class Call:
    """A generate call. Group, member, attempt and turn are those of headway's request ids (None in those of others)."""

    path: str
    request_id: str
    prompt: list[int]
    max_tokens: int
    seed: int
    temperature: float
    salt: str
    purpose: str | None = None
    group: int | None = None
    member: int | None = None
    attempt: int | None = None
    turn: int | None = None

    @property
    def session(self) -> str:
        """What an engine may keep together: one attempt."""
        return self.request_id if self.purpose is None else f"{self.purpose}-{self.group}-{self.member}-{self.attempt}"


def read_call(path: str, body: dict[str, Any], *, room: int) -> Call:
    """Read the body of a generate call; `room`: tokens that fit at most. Raises KeyError, TypeError, ValueError."""
    vllm = path == VLLM_PATH
    sampling = body.get("sampling_params") or {}
    prompt = [int(token) for token in body["token_ids" if vllm else "input_ids"]]
    if not prompt:
        raise ValueError("the prompt is empty")
    request_id = str(body.get("request_id" if vllm else "rid") or "")
    limit = sampling.get("max_tokens" if vllm else "max_new_tokens") or room
    named = _NAMED.match(request_id)
    names: dict[str, Any] = {}
    if named is not None:
        numbers = [int(number) for number in named.groups()[1:]]
        names = {"purpose": named[1], **dict(zip(("group", "member", "attempt", "turn"), numbers, strict=True))}
    return Call(
        path=path,
        request_id=request_id,
        prompt=prompt,
        max_tokens=max(1, min(int(limit), room - len(prompt))),
        seed=int(sampling.get("seed", sampling.get("sampling_seed", 0)) or 0),
        temperature=float(sampling.get("temperature", 1.0)),
        salt=str(body.get("cache_salt") or body.get("extra_key") or ""),
        **names,
    )


def facts_of(path: str, call: Call | None, query: dict[str, str], body: Any) -> dict[str, Any]:
    """Return what rules can match on. Of an administrative call: `path`, `mode`, `version` (a new label), `weights` (name of a directory).

    Names that a call has nothing for are None.
    """
    named = {name: getattr(call, name, None) for name in NAMES}
    body = body if isinstance(body, dict) else {}
    directory = body.get("model_path") or (body.get("kwargs") or {}).get("weights_path") or ""
    return {
        "path": path,
        **named,
        "prompt_tokens": len(call.prompt) if call else None,
        "mode": query.get("mode") or body.get("mode"),
        "version": body.get("new_version") or body.get("weight_version"),
        "weights": Path(directory).name,
    }


def logprobs_of(reply: Reply, ids: list[int]) -> list[float] | None:
    """Return the log-probabilities that a reply gives; None: it has none."""
    right = [logprob_of(token, index) for index, token in enumerate(ids)]
    match reply.logprobs:
        case "right":
            return right
        case "fewer":
            return right[:-1]
        case "more":
            return [*right, -1.0]
        case "none":
            return []
        case "absent":
            return None
        case "nan":
            return [float("nan"), *right[1:]]


def vllm_answer(call: Call, written: Written, reply: Reply) -> bytes:
    """Return the body of vLLM's answer."""
    logprobs = logprobs_of(reply, written.ids)
    choice: dict[str, Any] = {"index": 0, "token_ids": written.ids, "stop_reason": None}
    if written.finish:
        choice["finish_reason"] = written.finish
    if logprobs is not None:
        choice["logprobs"] = {"content": [{"token_id": 0, "logprob": value, "rank": 1} for value in logprobs]}
    if reply.spans == "right":
        choice["weight_versions"] = [{"version": label, "start": start, "end": end} for label, start, end in written.label_spans()]
    return json.dumps({"request_id": f"generate-tokens-{call.request_id}", "choices": [choice]}).encode()


def sglang_answer(call: Call, written: Written, reply: Reply) -> bytes:
    """Return the body of SGLang's answer."""
    logprobs = logprobs_of(reply, written.ids)
    meta: dict[str, Any] = {"id": call.request_id, "prompt_tokens": len(call.prompt), "completion_tokens": len(written.ids)}
    if written.finish:
        meta["finish_reason"] = {"type": written.finish}
    if logprobs is not None:
        ids = [*written.ids, 0][: len(logprobs)]
        meta["output_token_logprobs"] = [[value, token, None] for value, token in zip(logprobs, ids, strict=True)]
    if reply.spans == "right":
        spans = written.label_spans()
        meta["weight_versions"] = [{"version": label, "start": start, "end": end} for label, start, end in spans]
        meta["weight_version"] = spans[-1][0] if spans else ""
    return json.dumps({"text": "", "output_ids": written.ids, "meta_info": meta}).encode()


def answer(call: Call, written: Written, reply: Reply) -> bytes:
    """Return the body in the protocol of the call."""
    return vllm_answer(call, written, reply) if call.path == VLLM_PATH else sglang_answer(call, written, reply)
