"""Administers one engine: its label, and the three steps by which it takes new weights.

The engine is paused before its weights change and resumed only once they are whole: a reload that failed leaves it paused until another
succeeds or `abandon` gives up. Each call is limited in time, and sent again on a fresh connection when it failed in a way that may pass (a
broken connection, a 429 or 5xx), twice. A sync that fails all the same is not repeated here: who looks after lost engines does it anew. A
checkpoint whose files cannot be whole, or differ from the served one in a tensor's name, type or shape, never reaches the engine: some
servers mix old and new weights in silence, others die of it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from pathlib import Path
from typing import Any

import msgspec

from headway.adapters.engines.generation import excerpt
from headway.adapters.engines.http import ConnectionFailed, HttpPool, Response
from headway.adapters.engines.vllm.wire import read_label
from headway.errors import EngineFailed, EngineUnreachable, StorageError
from headway.formats.bounded import decode_json
from headway.formats.hold import Hold
from headway.formats.software import UNKNOWN, stated
from headway.formats.tensor_headers import read_tensors
from headway.rules.scheduling import backoff_seconds
from headway.settings import EngineSection
from headway.types import Checkpoint, EngineKind

_log = logging.getLogger(__name__)
_PAUSE_MODES = {"in_flight": "keep", "wait": "wait", "abort_resume": "abort"}
_ABANDON_SECONDS = 10.0
_RETRY_SECONDS = 0.2  # doubled per try
_LONGEST_RETRY_SECONDS = 2.0
_VERSION_SECONDS = 10.0
_MOST_ANSWER_BYTES = 1024**2
_MOST_METRICS_BYTES = 16 * 1024**2

_SAMPLED_TOKENS = re.compile(
    rb"^vllm:generation_tokens_total(?:\{[^\n]*\})? ([0-9]{1,18}(?:\.[0-9]{1,18})?(?:e\+?[0-9]{1,2})?)(?: [0-9]{1,18})?[ \t\r]*$",
    re.MULTILINE,
)

_FAILURE = re.compile(rb'"success"\s*:\s*false')


class _Version(msgspec.Struct, frozen=True):
    version: str
    software: str = "vllm"


Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name to (dtype, shape), as safetensors headers have it."""


class VllmEngine:
    """The administrative side of one vLLM-speaking server (`protocols.Engine`)."""

    def __init__(self, name: str, url: str, settings: EngineSection, *, retries: int = 2) -> None:
        self._name = name
        self._url = url.rstrip("/")
        self._pause_mode = _PAUSE_MODES[settings.weight_sync]
        self._keeps_cache = self._pause_mode == "keep" and not settings.recompute_kv
        self._timeout_seconds = settings.request_timeout_seconds
        self._retries = retries
        self._http = HttpPool()
        self._served: tuple[Tensors, Hold] | None = None  # what was committed last; its directory stays while it is served
        self._offered: tuple[Tensors, Hold] | None = None  # between prepare and commit

    @property
    def name(self) -> str:
        """A short name, unique in the run."""
        return self._name

    @property
    def url(self) -> str:
        """Base URL that workers send generations to."""
        return self._url

    @property
    def kind(self) -> EngineKind:
        """The protocol that it speaks."""
        return "vllm"

    async def label(self) -> str:
        """Return the version label that the engine says it serves ("default": it was started afresh)."""
        body = await self._call("GET", "/weight_info")
        try:
            return read_label(body)
        except msgspec.DecodeError as error:
            raise EngineFailed(f"{self._name}: {self._url}/weight_info named no weight_version: {excerpt(body)}") from error

    async def software(self) -> str:
        """Return what GET /version says: "vllm" and the version, or another name where `software` gives one; otherwise "unknown"."""
        try:
            async with asyncio.timeout(_VERSION_SECONDS):
                body = await self._call("GET", "/version")
            answer: _Version = decode_json(body, _Version)
        except (EngineFailed, TimeoutError, msgspec.MsgspecError):
            return UNKNOWN
        return stated(f"{answer.software} {answer.version}" if answer.version else "")

    async def sampled_tokens(self) -> int | None:
        """Return the counter `vllm:generation_tokens_total` of GET /metrics, summed over its labels; None where there is none."""
        try:
            async with asyncio.timeout(self._timeout_seconds):
                response = await self._http.request("GET", self._url + "/metrics", fresh=True, most=_MOST_METRICS_BYTES)
        except (ConnectionFailed, TimeoutError) as error:
            raise EngineFailed(f"{self._name}: {self._url}/metrics cannot be read: {error}") from error
        if response.status != 200:
            return None
        counts = _SAMPLED_TOKENS.findall(response.body)
        return sum(round(float(count)) for count in counts) if counts else None

    async def prepare(self, checkpoint: Checkpoint) -> None:
        """Check the checkpoint's files and hold them, then pause. Raises `StorageError` (files), `EngineFailed`."""
        await self._offer(Path(checkpoint.directory))
        await self._call("POST", f"/pause?mode={self._pause_mode}&clear_cache={'false' if self._keeps_cache else 'true'}")

    async def transfer(self, checkpoint: Checkpoint) -> None:
        """Let the engine load the checkpoint's weights in place."""
        request = {"method": "reload_weights", "kwargs": {"weights_path": checkpoint.directory}}
        await self._call("POST", "/collective_rpc", request)

    async def commit(self, checkpoint: Checkpoint) -> None:
        """Label the weights, drop caches of the old ones, serve again, and see that the engine says so.

        Without `prepare` before it: for an engine that has these weights, and may have been left paused by whoever brought them.
        """
        if self._offered is None:
            await self._offer(Path(checkpoint.directory))
        await self._call("POST", "/update_weight_version", {"new_version": checkpoint.label})
        if self._keeps_cache:
            answer = await self._call("POST", "/reset_prefix_cache")
            if _FAILURE.search(answer):
                raise EngineFailed(f"{self._name}: {self._url} did not reset its prefix cache: {excerpt(answer)}")
        await self._call("POST", "/resume")
        served = await self.label()
        if served != checkpoint.label:
            raise EngineFailed(
                f'{self._name}: {self._url} says it serves "{served}" after it was given "{checkpoint.label}": does another run use it?'
            )
        if self._served is not None:
            self._served[1].release()
        self._served, self._offered = self._offered, None

    async def abandon(self) -> None:
        """Resume the engine whatever state it is in; bounded, and never raises."""
        self._release_offer()
        try:
            async with asyncio.timeout(min(_ABANDON_SECONDS, self._timeout_seconds)):
                await self._call("POST", "/resume")
        except (EngineFailed, TimeoutError) as error:
            _log.warning("%s could not be resumed after a failed weight sync: %s", self._name, str(error) or "no answer in time")

    async def sleep(self) -> None:
        """Free weights and cache (POST /sleep; the server needs --enable-sleep-mode)."""
        await self._call("POST", "/sleep?level=2")

    async def wake(self) -> None:
        """Take the memory again (POST /wake_up); its weights are to be synced before it serves."""
        await self._call("POST", "/wake_up")

    async def close(self) -> None:
        """Release connections and checkpoints; idempotent."""
        self._release_offer()
        if self._served is not None:
            self._served[1].release()
        await self._http.close()

    async def _offer(self, directory: Path) -> None:
        """Check the checkpoint's files, and hold them until the next ones are served."""
        self._release_offer()
        hold = Hold(directory)
        try:
            tensors = await asyncio.to_thread(_tensors, directory)
            if self._served is not None and tensors != self._served[0]:
                raise StorageError(f"{directory} does not fit the model that {self._name} serves: {_difference(self._served[0], tensors)}")
        except BaseException:
            hold.release()
            raise
        self._offered = tensors, hold

    def _release_offer(self) -> None:
        if self._offered is not None:
            self._offered[1].release()
            self._offered = None

    async def _call(self, method: str, path: str, body: Any = None) -> bytes:
        """Send one administrative call and return the body of its 200. Raises `EngineFailed`, which names engine, call and answer."""
        data = b"" if body is None else msgspec.json.encode(body)
        call = f"{self._name}: {method} {self._url}{path}"
        problem, cause = "", None
        for tries in range(self._retries + 1):
            if tries:
                await asyncio.sleep(backoff_seconds(tries, random.random(), first=_RETRY_SECONDS, longest=_LONGEST_RETRY_SECONDS))  # noqa: S311
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    response = await self._http.request(method, self._url + path, data, fresh=True, most=_MOST_ANSWER_BYTES)
            except TimeoutError as late:  # it may be at it still: not sent again, the engine is lost
                raise EngineFailed(f"{call} was not answered within {self._timeout_seconds:g} s (engine.request_timeout_seconds)") from late
            except ConnectionFailed as error:
                problem, cause = str(error), error
                continue
            if response.status == 200:
                return response.body
            problem, cause = _refusal(response), None
            if response.status < 500 and response.status != 429:
                break
        raise (EngineFailed if cause is None else EngineUnreachable)(f"{call} failed: {problem}") from cause


def _refusal(response: Response) -> str:
    hint = " (is the server started with VLLM_SERVER_DEV_MODE=1?)" if response.status == 404 else ""
    return f"it answered {response.status}: {excerpt(response.body)}{hint}"


def _tensors(directory: Path) -> Tensors:
    return {name: (entry.dtype, entry.shape) for name, entry in read_tensors(directory).items()}


def _difference(served: Tensors, offered: Tensors) -> str:
    """Name one tensor that differs, for people."""
    for name in sorted(served.keys() | offered.keys()):
        if served.get(name) != offered.get(name):
            return f"tensor {name} is {offered.get(name, 'missing')}, served is {served.get(name, 'none')}"
    return "no tensor differs"
