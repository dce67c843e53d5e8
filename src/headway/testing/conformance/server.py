"""The server under test, spoken to by its protocol alone: none of headway's clients, so that neither hides what the other does.

vLLM by /inference/v1/generate, or by /v1/completions where that is not served; SGLang by /generate.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from headway.adapters.engines.generation import excerpt
from headway.adapters.engines.http import ConnectionFailed, HttpPool, Response
from headway.adapters.engines.lora import served_models
from headway.testing.conformance.verdicts import Failed, Skipped
from headway.types import EngineAddress, EngineKind

Route = Literal["generate", "completions", "sglang"]
_PATHS: dict[Route, str] = {"generate": "/inference/v1/generate", "completions": "/v1/completions", "sglang": "/generate"}
_RUNNING = re.compile(r"^(?:vllm:num_requests_running|sglang:num_running_reqs)(?:\{[^\n]*\})? ([0-9.e+]+)$", re.MULTILINE)
_ONE_TOKEN = 1e-4
# What completions leave out, the model's generation_config.json fills in.
_NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class Answer(NamedTuple):
    """What a generation brought. `spans`: (label, start, end) per run of tokens; None: the server names no versions."""

    ids: list[int]
    logprobs: list[float]
    finish: str
    spans: list[tuple[str, int, int]] | None


class Server:
    """One server; `close` it. `route` is known after `find_route`."""

    def __init__(self, address: EngineAddress) -> None:
        self.address = address
        self.route: Route = "sglang" if address.kind == "sglang" else "generate"
        self._url = address.url.rstrip("/")
        self._http = HttpPool()
        self._base = ""

    @property
    def is_sglang(self) -> bool:
        """Whether it speaks SGLang's protocol."""
        return self.address.kind == "sglang"

    @property
    def resume_path(self) -> str:
        """What ends a pause."""
        return "/continue_generation" if self.is_sglang else "/resume"

    async def call(self, method: str, path: str, body: Any = None) -> Response:
        """Send one call. Raises `Failed` where there is no answer."""
        data = b"" if body is None else msgspec.json.encode(body)
        try:
            return await self._http.request(method, self._url + path, data)
        except ConnectionFailed as error:
            raise Failed(f"{method} {path}: {error}") from error

    async def get(self, path: str, body: Any = None, *, method: str = "GET") -> Any:
        """Send one call that must be answered 200, and return its JSON (None: it has none)."""
        response = await self.call(method, path, body)
        if response.status != 200:
            raise Failed(f"{method} {path} answered {response.status}: {excerpt(response.body)}")
        try:
            return msgspec.json.decode(response.body)
        except msgspec.DecodeError:
            return None

    async def find_route(self) -> None:
        """Find out how it is asked for tokens."""
        models = await self.call("GET", "/v1/models")
        if models.status == 200:
            self._base = str(_found(models, "/v1/models", "data", 0, "id"))
        if not self.is_sglang:
            probe = await self.call("POST", _PATHS["generate"], {})
            self.route = "completions" if probe.status in {403, 404} else "generate"

    async def speaks_other(self) -> EngineKind | None:
        """Return the other kind where it is that one's generations that it serves; None: it is not, or it cannot be told."""
        other: Route = "generate" if self.is_sglang else "sglang"
        if (await self.call("POST", _PATHS["sglang" if self.is_sglang else "generate"], {})).status != 404:
            return None
        if (await self.call("POST", _PATHS[other], {})).status == 404:
            return None
        return "vllm" if self.is_sglang else "sglang"

    async def label(self) -> str:
        """Return which weights it says it serves."""
        response = await self.call("GET", "/model_info" if self.is_sglang else "/weight_info")
        if response.status == 404 and self.is_sglang:
            response = await self.call("GET", "/get_model_info")  # its older name
        if response.status != 200:
            hint = "" if self.is_sglang else " (start vLLM with VLLM_SERVER_DEV_MODE=1)"
            raise Failed(f"asked for the label of its weights, it answered {response.status}{hint}: {excerpt(response.body)}")
        return str(_found(response, "asked for the label of its weights, it", "weight_version"))

    async def context(self) -> int:
        """Return its context in tokens. Raises `Skipped` where it does not say."""
        models = await self.call("GET", "/v1/models")
        told = _found(models, "/v1/models", "data", 0) if models.status == 200 else None
        length = told.get("max_model_len") if isinstance(told, dict) else None
        if not isinstance(length, int) or length < 1:
            raise Skipped("the server does not say how long its context is")
        return length

    async def models(self) -> list[str]:
        """Return the names that it lists: its model's, and those of adapters."""
        listed = await self.call("GET", "/v1/models")
        try:
            return served_models(listed.body)
        except msgspec.MsgspecError as error:
            raise Failed(f"/v1/models answered {listed.status} and listed no models: {excerpt(listed.body)}") from error

    async def send(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        seed: int = 0,
        likeliest: bool = False,
        endless: bool = False,
        stops: Sequence[int] = (),
        model: str = "",
    ) -> Response:
        """Ask for tokens and return the answer as it is; `name` is the request's id. `likeliest`: only those may be drawn.

        `endless`: beyond the end-of-sequence token, up to `max_tokens`.
        """
        sampling: dict[str, Any] = {"temperature": temperature, "stop_token_ids": list(stops)}
        if endless:
            sampling["ignore_eos"] = True
        if likeliest:  # with top_k = 1 SGLang decodes greedily, which has log-probabilities of its own
            sampling |= {"top_p": _ONE_TOKEN} if self.is_sglang else {"top_k": 1}
        body: dict[str, Any]
        if self.route == "sglang":
            sampling |= {"max_new_tokens": max_tokens, "sampling_seed": seed}
            body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True, "rid": name}
            if model:
                body["lora_path"] = model
        elif self.route == "completions":
            body = {"request_id": name, "prompt": list(prompt), "model": model or self._base, "max_tokens": max_tokens, "seed": seed}
            body |= {"logprobs": 0, "return_token_ids": True, **_NEUTRAL, **sampling}
        else:
            sampling |= {"max_tokens": max_tokens, "seed": seed, "logprobs": 0}
            body = {"request_id": name, "token_ids": list(prompt), "sampling_params": sampling, "stream": False}
            if model:
                body["model"] = model
        return await self.call("POST", _PATHS[self.route], body)

    async def generate(self, name: str, prompt: Sequence[int], *, max_tokens: int, **sampling: Any) -> Answer:
        """Ask for tokens and read the answer. Raises `Failed` for one that is not whole."""
        response = await self.send(name, prompt, max_tokens=max_tokens, **sampling)
        if response.status != 200:
            raise Failed(f"{_PATHS[self.route]} answered {response.status}: {excerpt(response.body)}")
        try:
            return _read(self.route, msgspec.json.decode(response.body))
        except msgspec.DecodeError as error:
            raise Failed(f"{_PATHS[self.route]} gave an answer that is no JSON: {excerpt(response.body)}") from error
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise Failed(f"{_PATHS[self.route]} gave an answer without {error}: {excerpt(response.body)}") from error

    async def abort(self, name: str) -> None:
        """Abort a generation by the id that it was sent with."""
        if self.is_sglang:
            await self.get("/abort_request", {"rid": name}, method="POST")
        else:
            await self.get("/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{name}"]}, method="POST")

    async def pause(self) -> None:
        """Pause, keeping what is in flight for later, its context to be recomputed."""
        if self.is_sglang:
            await self.get("/pause_generation", {"mode": "retract"}, method="POST")
        else:
            await self.get("/pause?mode=keep&clear_cache=true", method="POST")

    async def resume(self) -> None:
        """End a pause; harmless where there is none."""
        await self.get(self.resume_path, {}, method="POST")

    async def forget(self) -> None:
        """Drop its prefix cache."""
        await self.get("/flush_cache" if self.is_sglang else "/reset_prefix_cache", method="POST")

    async def is_paused(self) -> bool | None:
        """Return whether it says that it is paused; None: it does not say."""
        response = await self.call("GET", "/ready" if self.is_sglang else "/is_paused")
        if self.is_sglang:
            return {200: False, 503: True}.get(response.status)
        return bool(_found(response, "/is_paused", "is_paused")) if response.status == 200 else None

    async def running(self) -> int | None:
        """Return how many requests it says are running; None: it has no metrics."""
        response = await self.call("GET", "/metrics")
        found = _RUNNING.findall(response.body.decode("utf-8", "replace")) if response.status == 200 else []
        return round(sum(float(number) for number in found)) if found else None

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()


def _found(response: Response, who: str, *path: str | int) -> Any:
    """Return what stands at `path` in an answer. Raises `Failed` where nothing does: a proxy may answer anything with 200."""
    try:
        found = msgspec.json.decode(response.body)
        for step in path:
            found = found[step]
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise Failed(f"{who} answered 200 without {'.'.join(map(str, path))}: {excerpt(response.body)}") from error
    return found


def _read(route: Route, value: Any) -> Answer:
    if route == "sglang":
        meta = value["meta_info"]
        ids, entries, spans = value["output_ids"], meta["output_token_logprobs"], meta.get("weight_versions")
        logprobs, finish = [entry[0] for entry in entries], meta["finish_reason"]["type"]
    else:
        [choice] = value["choices"]
        ids, finish, spans = choice["token_ids"], choice["finish_reason"], choice.get("weight_versions")
        told = choice.get("logprobs") or {}
        logprobs = told.get("token_logprobs", []) if route == "completions" else [entry["logprob"] for entry in told.get("content") or []]
    named = None if spans is None else [(str(span["version"]), int(span["start"]), int(span["end"])) for span in spans]
    return Answer([int(token) for token in ids], [float(value) for value in logprobs], str(finish), named)
