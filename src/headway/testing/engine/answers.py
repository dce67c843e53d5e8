"""The answers to generate calls, as vLLM and as SGLang write them: honest ones, and the refusals of what can never be served."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from headway.testing.engine.calls import COMPLETIONS_PATH, SGLANG_PATH, Call
from headway.testing.engine.generation import Written
from headway.testing.engine.script import EngineScript, Reply


def refusal_of(call: Call, script: EngineScript, adapters: Collection[str]) -> Reply | None:
    """Return the answer to a call that cannot be served, None for one that can: too long, no such id, no such adapter."""
    sglang, length, context = call.path == SGLANG_PATH, len(call.prompt), script.context
    wrong = next((token for token in call.prompt if not 0 <= token < script.vocabulary), None)
    if call.adapter and call.adapter not in adapters:
        if sglang:
            return refused(400, f"The following requested LoRA adapters are not loaded: {call.adapter}\nLoaded adapters: {list(adapters)}.")
        return refused(404, f"The model `{call.adapter}` does not exist.", kind="NotFoundError")
    if sglang:
        if length >= context:
            return refused(400, f"The input ({length} tokens) is longer than the model's context length ({context} tokens).")
        if call.asked is not None and length + call.asked > context:
            return refused(
                400,
                f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a total of "
                f"{length + call.asked} tokens: {length} tokens from the input messages and {call.asked} tokens for the completion. Please "
                "reduce the number of tokens in the input messages or the completion to fit within the limit.",
            )
        if wrong is not None:
            return refused(400, f"The input_ids {call.prompt} contains values greater than the vocab size ({script.vocabulary}).")
    elif length >= context:
        return refused(
            400,
            f"This model's maximum context length is {context} tokens. However, you requested 0 output tokens and your prompt contains at "
            f"least {length} input tokens, for a total of at least {length} tokens. Please reduce the length of the input prompt or the "
            "number of requested output tokens.",
        )
    elif wrong is not None:
        return refused(400, f"Token id {wrong} is out of vocabulary")
    return None


def refused(status: int, message: str, *, kind: str = "BadRequestError") -> Reply:
    """Return an error answer."""
    return Reply(status=status, json={"error": {"message": message, "type": kind, "code": status}})


def logprobs_of(reply: Reply, written: Written) -> list[float] | None:
    """Return the log-probabilities that a reply gives; None: it has none."""
    right = written.logprobs
    match reply.logprobs:
        case "right" | "raw":
            return list(right)
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


def answer(call: Call, written: Written, reply: Reply, script: EngineScript) -> bytes:
    """Return the body in the protocol of the call."""
    logprobs = logprobs_of(reply, written)
    stop = written.ids[-1] if written.finish == "stop" and written.ids and written.ids[-1] != script.eos else None
    if call.path == SGLANG_PATH:
        value = _sglang(call, written, reply, logprobs, stop)
    elif call.path == COMPLETIONS_PATH:
        value = _completion(call, written, logprobs, stop)
    else:
        value = _vllm(call, written, reply, logprobs, stop)
    return json.dumps(value).encode()


def _vllm(call: Call, written: Written, reply: Reply, logprobs: list[float] | None, stop: int | None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "token_ids": written.ids, "stop_reason": stop}
    if written.finish:
        choice["finish_reason"] = written.finish
    if logprobs is not None:
        ids = [*written.ids, 0]
        choice["logprobs"] = {"content": [{"token_id": ids[i], "logprob": value, "rank": 1} for i, value in enumerate(logprobs)]}
    if reply.spans == "right":
        choice["weight_versions"] = _spans(written)
    return {"request_id": call.abort_name, "choices": [choice]}


def _completion(call: Call, written: Written, logprobs: list[float] | None, stop: int | None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": written.ids, "prompt_token_ids": call.prompt, "stop_reason": stop}
    if written.finish:
        choice["finish_reason"] = written.finish
    if logprobs is not None:
        names = [f"token_id:{token}" for token in [*written.ids, 0][: len(logprobs)]]
        choice["logprobs"] = {"tokens": names, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": [0] * len(names)}
    usage = {"prompt_tokens": len(call.prompt), "completion_tokens": len(written.ids)}
    return {"id": call.abort_name, "object": "text_completion", "model": call.adapter or "fake", "choices": [choice], "usage": usage}


def _sglang(call: Call, written: Written, reply: Reply, logprobs: list[float] | None, stop: int | None) -> dict[str, Any]:
    meta: dict[str, Any] = {"id": call.request_id, "prompt_tokens": len(call.prompt), "completion_tokens": len(written.ids)}
    if written.finish:
        meta["finish_reason"] = {"type": written.finish}
        if written.finish == "stop":
            meta["finish_reason"]["matched"] = stop if stop is not None else written.ids[-1] if written.ids else None
        if written.finish == "length":
            meta["finish_reason"]["length"] = len(written.ids)
        if written.finish == "abort":
            meta["finish_reason"]["message"] = "Aborted"
    if logprobs is not None:
        ids = [*written.ids, 0][: len(logprobs)]
        meta["output_token_logprobs"] = [[value, token, None] for value, token in zip(logprobs, ids, strict=True)]
    if reply.spans == "right":
        meta["weight_versions"] = _spans(written)
        meta["weight_version"] = written.labels[-1] if written.labels else ""
    return {"text": "", "output_ids": written.ids, "meta_info": meta}


def _spans(written: Written) -> list[dict[str, Any]]:
    return [{"version": label, "start": start, "end": end} for label, start, end in written.label_spans()]
