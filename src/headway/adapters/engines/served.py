"""What a client knows of one server that it sends generations to.

Most of it is learnt from its answers, and forgotten when a connection to it breaks: a server that is back may have been started otherwise.
"""

from __future__ import annotations

import asyncio
import math

import msgspec
from msgspec.structs import replace

from headway.adapters.engines.generation import Ask, Dialect, GenerationFailed, Labels, Stamps, excerpt
from headway.adapters.engines.http import BadResponse, HttpPool, Response
from headway.adapters.engines.lora import served_models
from headway.adapters.engines.sglang import wire as sglang
from headway.adapters.engines.vllm.completions import COMPLETIONS
from headway.adapters.engines.vllm.wire import GENERATE, read_label
from headway.types import EngineAddress, EngineKind

_MOST_BYTES = 1024**2  # of a label, of a list of models
_UNNAMED = "default"  # what servers call weights that nobody has named
_BASE_VERSION = 0  # the model that adapters begin with
_FIRST: dict[EngineKind, Dialect] = {"vllm": GENERATE, "sglang": sglang.GENERATE}


class Served:
    """One server.

    `dialect`: how it is spoken to. `names_versions`: it does so in its answers; of others the label is asked for before each request.
    `room`: tokens, prompt and answer together, that it has said fit its context; None: it has not complained.
    """

    def __init__(self, engine: EngineAddress, labels: Labels, http: HttpPool) -> None:
        self.engine = engine
        self._labels = labels
        self._by_answer = Stamps(labels)
        self._http = http
        self._had_adapters = False
        self._adapter = ("", _BASE_VERSION)
        self._looked_at = -math.inf  # for the adapter
        self._looking = asyncio.Lock()
        self.forget()

    def forget(self) -> None:
        """A connection broke."""
        self.dialect = _FIRST[self.engine.kind]
        self.names_versions = False
        self.room: int | None = None

    async def prepare(self, ask: Ask, *, lora: bool) -> tuple[Ask, Stamps]:
        """Return what to ask for, and how the answer will be stamped. Raises `GenerationFailed`, `ConnectionFailed`."""
        if self.room is not None:
            ask = replace(ask, max_tokens=max(1, min(ask.max_tokens, self.room - len(ask.token_ids))))
        if lora:
            model, version = await self._newest_adapter()
            return replace(ask, model=model), Stamps(self._labels, fixed=version)
        return ask, self._by_answer if self.names_versions else Stamps(self._labels, oldest=await self._label())

    def learn_route(self, used: Dialect, response: Response) -> bool:
        """Whether an answer says that there is no such route, and another one is tried from here on (vLLM without --enable-scale-out)."""
        if used is not GENERATE or response.status not in {403, 404} or _is_about_a_model(response):
            return False
        self.dialect = COMPLETIONS
        self.names_versions = False
        return True

    def learn_room(self, ask: Ask, context: int | None) -> bool:
        """Whether a request that did not fit a context of so many tokens would with a smaller budget.

        vLLM's own route clamps a budget; its completions and SGLang refuse prompt and budget together, some at exactly the context.
        """
        length = len(ask.token_ids)
        asked = length + ask.max_tokens
        if context is None or asked < context:
            return False
        room = min(context, asked - 1)
        if room <= length:
            return False
        self.room = room
        return True

    async def _label(self) -> str | None:
        """Return the label that the engine serves now; None when it does not say. Raises `ConnectionFailed`."""
        for path in self.dialect.label_paths:
            try:
                response = await self._http.request("GET", self.engine.url + path, most=_MOST_BYTES)
                if response.status == 200:
                    return read_label(response.body)
            except (BadResponse, msgspec.DecodeError):
                return None
        return None

    async def _newest_adapter(self) -> tuple[str, int]:
        """Return name and version of the newest adapter of this run; an empty name: of the base model, which they began with.

        It is the newest at the time of the call: a group that was born at a version has no token of the one before.
        """
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        async with self._looking:
            if self._looked_at <= asked_at:  # otherwise somebody has looked since, for all who wait
                began = loop.time()
                self._adapter = await self._look_for_adapters()
                self._looked_at = began
        return self._adapter

    async def _look_for_adapters(self) -> tuple[str, int]:
        url = self.engine.url + "/v1/models"
        response = await self._http.request("GET", url, most=_MOST_BYTES)
        try:
            names = served_models(response.body)
        except msgspec.MsgspecError:
            said = f"{url} answered {response.status} and listed no models: {excerpt(response.body)}"
            raise GenerationFailed(said, lost=response.status >= 500) from None
        found = [(version, name) for name in names if (version := self._labels.find(name)) is not None]
        if found:
            self._had_adapters = True
            version, name = max(found)
            return name, version
        label = await self._label() or _UNNAMED
        if self._had_adapters or not (label == _UNNAMED or self._labels.find(label) == _BASE_VERSION):
            raise GenerationFailed(
                f'{self.engine.url} has no LoRA adapter of this run, and calls its own weights "{label[:80]}"', lost=True
            )
        return "", _BASE_VERSION


def lacks_adapter(response: Response) -> bool:
    """Whether an answer says that the adapter that was asked for is not there (any more)."""
    return response.status in {400, 404} and _is_about_a_model(response)


def _is_about_a_model(response: Response) -> bool:
    """Whether a refusal says that a model or adapter is not there, and not that the route is not."""
    said = response.body[:_MOST_BYTES].lower()
    return (b"model" in said and b"does not exist" in said) or (b"lora" in said and b"not loaded" in said)
