"""What a generate call asks for, in each of the protocols of the fake engine, as a value; and what rules can match on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VLLM_PATH = "/inference/v1/generate"
COMPLETIONS_PATH = "/v1/completions"
SGLANG_PATH = "/generate"
GENERATIONS = (VLLM_PATH, COMPLETIONS_PATH, SGLANG_PATH)
BASE_MODEL = "fake"
NAMES = ("session", "request_id", "purpose", "group", "member", "attempt", "turn", "seed", "max_tokens", "adapter")
_NAMED = re.compile(r"(train|eval)-(\d+)-(\d+)-(\d+)-(\d+)(?:-|$)")
PROBE = "probe"
"""`purpose` of the requests by which headway finds out what an engine serves."""
_PROMPTS = {VLLM_PATH: "token_ids", COMPLETIONS_PATH: "prompt", SGLANG_PATH: "input_ids"}


@dataclass(frozen=True)
class Call:
    """A generate call. Group, member, attempt and turn are those of headway's request ids (None in those of others).

    `asked`: tokens as they were asked for, None: as many as fit; `max_tokens`: as many of them as fit. `adapter` empty: the base model.
    """

    path: str
    request_id: str
    prompt: list[int]
    asked: int | None
    max_tokens: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    stops: tuple[int, ...]
    salt: str
    adapter: str
    purpose: str | None = None
    group: int | None = None
    member: int | None = None
    attempt: int | None = None
    turn: int | None = None

    @property
    def session(self) -> str:
        """What an engine may keep together: one attempt."""
        return self.request_id if self.group is None else f"{self.purpose}-{self.group}-{self.member}-{self.attempt}"

    @property
    def abort_name(self) -> str:
        """What the engine itself calls the request, and wants to be told to abort it."""
        return {VLLM_PATH: "generate-tokens-", COMPLETIONS_PATH: "cmpl-", SGLANG_PATH: ""}[self.path] + self.request_id


def read_call(path: str, body: dict[str, Any], *, room: int, header_id: str = "") -> Call:
    """Read the body of a generate call; `room`: tokens that fit at most. Raises KeyError, TypeError, ValueError."""
    sglang = path == SGLANG_PATH
    sampling = body if path == COMPLETIONS_PATH else body.get("sampling_params") or {}
    prompt = [int(token) for token in body[_PROMPTS[path]]]
    if not prompt:
        raise ValueError("the prompt is empty")
    request_id = str(body.get("rid" if sglang else "request_id") or header_id)
    asked = sampling.get("max_new_tokens" if sglang else "max_tokens")
    named = _NAMED.match(request_id)
    names: dict[str, Any] = {}
    if named is not None:
        numbers = [int(number) for number in named.groups()[1:]]
        names = {"purpose": named[1], **dict(zip(("group", "member", "attempt", "turn"), numbers, strict=True))}
    elif request_id.startswith("probe-"):
        names = {"purpose": PROBE}
    model = str(body.get("lora_path" if sglang else "model") or "")
    return Call(
        path=path,
        request_id=request_id,
        prompt=prompt,
        asked=None if asked is None else int(asked),
        max_tokens=max(1, min(int(asked or room), room - len(prompt))),
        seed=int(sampling.get("seed", sampling.get("sampling_seed", 0)) or 0),
        temperature=float(sampling.get("temperature", 1.0)),
        top_k=int(sampling.get("top_k") or 0),
        top_p=float(sampling.get("top_p") or 1.0),
        stops=tuple(sampling.get("stop_token_ids") or ()),
        salt=str(body.get("cache_salt") or body.get("extra_key") or ""),
        adapter="" if model == BASE_MODEL else model,
        **names,
    )


def facts_of(path: str, call: Call | None, query: dict[str, str], body: Any) -> dict[str, Any]:
    """Return what rules can match on. Of an administrative call: `path`, `mode`, `version` (a new label), `weights` (name of a directory).

    `adapter` is the LoRA adapter that is loaded, unloaded or generates. Names that a call has nothing for are None.
    """
    named = {name: getattr(call, name, None) for name in NAMES}
    body = body if isinstance(body, dict) else {}
    directory = body.get("model_path") or (body.get("kwargs") or {}).get("weights_path") or body.get("lora_path") or ""
    return {
        "path": path,
        **named,
        "adapter": call.adapter if call else body.get("lora_name"),
        "prompt_tokens": len(call.prompt) if call else None,
        "mode": query.get("mode") or body.get("mode"),
        "version": body.get("new_version") or body.get("weight_version"),
        "weights": Path(directory).name,
    }
