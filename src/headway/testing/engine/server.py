"""The fake engine: a real HTTP server that speaks the parts of vLLM and SGLang that headway uses, and does as its script says.

Honest unless a rule says otherwise: it samples by the request's seed, stamps each token with the label of its moment, holds requests during
a pause, frees what a client has left. Everything that happens is logged (`log.entries`, and a file if one is named):

    served {url}   arrived {id, path, request_id, session, purpose, group, member, attempt, turn, seed, max_tokens, adapter, temperature,
    salt, prompt, label, paused, running}   finished {id, ids, logprobs, labels, loaded, adapter, finish, status, disconnected, cache_hits,
    stale_hits, paused}   asked {id, path, query, body, authorization}   answered {id, path, status, paused}
    loaded {version, directory, whole}   adapter {name, directory}   adapter_gone {name}   killed

By probes headway finds out what an engine serves: they are logged as `probed` and `probe_answered` in place of `arrived` and `finished`,
and rules and default are not for them, but those that say "raw" or match on `purpose` or `request_id`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web

from headway.testing.engine.admin import PATHS, Administration
from headway.testing.engine.answers import answer, logprobs_of, refusal_of
from headway.testing.engine.calls import GENERATIONS, NAMES, PROBE, SGLANG_PATH, Call, facts_of, read_call
from headway.testing.engine.exchange import send
from headway.testing.engine.generation import Generation, Written
from headway.testing.engine.listening import Listener
from headway.testing.engine.live import LiveGenerations
from headway.testing.engine.lora import Adapters
from headway.testing.engine.replies import Replies
from headway.testing.engine.sampling import Sampler
from headway.testing.engine.script import EngineScript, Reply, Rule, planned
from headway.testing.engine.weights import Weights
from headway.testing.log import FakeLog


class FakeEngine:
    """One engine; use it as an async context. `rules` may be replaced while it runs; `log.entries` tells what it did."""

    def __init__(
        self,
        rules: Sequence[Rule] = (),
        *,
        script: EngineScript | None = None,
        default: Reply | None = None,
        label: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        log: Path | str | None = None,
        dies: Callable[[], None] | None = None,
    ) -> None:
        self.script = script or EngineScript()
        self._replies = Replies([*rules, *self.script.rules], default or self.script.default)
        self.weights = Weights(label or self.script.label, self.script.model)
        self.log = FakeLog(log)
        self.adapters = Adapters(self.log)
        self.url = ""
        self.running = self.peak = 0
        self._dies = dies
        self._numbers = itertools.count(1)
        self._live = LiveGenerations()
        self._changed = asyncio.Event()
        self._listener = Listener(host, port, self._answer)
        self._administration = Administration(
            self.weights, self.adapters, self.log, self.script, self._live.abort, self._until_idle, lambda: self._live.are_writing
        )
        self.log.listeners.append(self._changed.set)

    async def start(self) -> None:
        """Listen, on a free port unless one was given or used before."""
        self.url = await self._listener.start()
        self.log.add("served", url=self.url)

    async def stop(self) -> None:
        """Stop listening and cut every connection; idempotent."""
        await self._listener.stop()

    async def kill(self) -> None:
        """Die as by kill -9: connections break, and what was loaded is lost. `start` brings a fresh server up at the same address."""
        self.log.add("killed")
        await self.stop()
        self._live.die()
        self.weights.restart()
        self.adapters.loaded.clear()

    async def __aenter__(self) -> Self:
        """Listen."""
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop."""
        await self.stop()
        self.log.close()

    @property
    def rules(self) -> Sequence[Rule]:
        """What it does otherwise than an honest engine; set anew, they count from zero."""
        return self._replies.rules

    @rules.setter
    def rules(self, rules: Sequence[Rule]) -> None:
        self._replies.replace(rules)

    @property
    def default(self) -> Reply:
        """What it replies to a generation where no rule fires."""
        return self._replies.default

    @default.setter
    def default(self, reply: Reply) -> None:
        self._replies.default = reply

    @property
    def generated(self) -> int:
        """How many tokens it has sampled, of generations that are over."""
        return self._live.sampled

    @property
    def host(self) -> str:
        """Where it listens."""
        return self._listener.host

    @property
    def port(self) -> int:
        """Its port, kept over its deaths; 0 before the first start unless one was given."""
        return self._listener.port

    @property
    def paused(self) -> bool:
        """Whether a pause has not been ended."""
        return self.weights.pause is not None

    async def until(self, condition: Callable[[], bool], *, limit: float = 60.0) -> None:
        """Wait until `condition` holds; looked at whenever something is logged. Raises TimeoutError."""
        async with asyncio.timeout(limit):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    # ------------------------------------------------------------------------------------------------------------------------------ HTTP

    async def _answer(self, http: web.BaseRequest) -> web.StreamResponse:
        try:
            body = json.loads(await http.read() or b"{}")
        except ValueError as error:
            return web.json_response({"error": {"message": f"no JSON: {error}"}}, status=400)
        if http.path == "/_fake/rules":
            self.rules = msgspec.convert(body, list[Rule])
            return web.json_response({})
        if not self.script.generate_route and http.path.startswith("/inference/v1/"):
            return web.json_response({"error": {"message": "start the server with --enable-scale-out"}}, status=403)
        if (http.method, http.path) in PATHS[self.script.speaks]:
            return await self._administer(http, body)
        if http.path == "/metrics":
            return web.Response(text=self._live.metrics(self.script.speaks))
        other = {"vllm": "sglang", "sglang": "vllm", "both": ""}[self.script.speaks]
        if http.path not in GENERATIONS or ("sglang" if http.path == SGLANG_PATH else "vllm") == other:
            return web.json_response({"detail": "Not Found"}, status=404)
        try:
            call = read_call(http.path, body, room=self.script.context, header_id=http.headers.get("X-Request-Id", ""))
        except (KeyError, TypeError, ValueError) as error:
            return web.json_response({"error": {"message": f"bad request: {error!r}"}}, status=400)
        return await self._generate(http, call)

    async def _generate(self, http: web.BaseRequest, call: Call) -> web.StreamResponse:
        number, probes = next(self._numbers), call.purpose == PROBE
        self.running += not probes
        self.peak = max(self.peak, self.running)
        facts = {name: getattr(call, name) for name in (*NAMES, "path", "prompt", "temperature", "salt")}
        self.log.add(
            "probed" if probes else "arrived", id=number, **facts, label=self.weights.label, paused=self.paused, running=self.running
        )
        reply = self._replies.to(facts_of(http.path, call, {}, {}))
        if reply.is_honest:
            reply = refusal_of(call, self.script, self.adapters.loaded) or reply
        written, status, gone = Written(), reply.status, True
        try:
            if reply.is_honest and not (reply.hang or reply.cut or reply.kill):
                written = await self._write(call, reply, number)
                if reply.label is not None:
                    written.labels = [reply.label] * len(written.ids)
                response = await self._send(http, reply, answer(call, written, reply, self.script), after=0.0)
            else:
                response = await self._send(http, reply, b"", after=reply.seconds)
            gone = reply.cut
            return response
        finally:
            self.running -= not probes
            self.log.add(
                "probe_answered" if probes else "finished",
                id=number,
                ids=written.ids,
                logprobs=logprobs_of(reply, written),
                labels=written.label_spans(),
                loaded=written.loaded_spans(),
                adapter=call.adapter,
                finish=written.finish,
                status=status,
                disconnected=gone,
                paused=self.paused,
                cache_hits=written.hits,
                stale_hits=written.stale,
            )

    async def _write(self, call: Call, reply: Reply, number: int) -> Written:
        sampler = Sampler(call, reply, self.script, self.weights)
        ids, finish = planned(reply, self.script, seed=call.seed, max_tokens=call.max_tokens, stops=call.stops, greedy=sampler.is_greedy)
        pace = self.script.token_seconds if reply.token_seconds is None else reply.token_seconds
        key = call.abort_name if call.request_id else str(number)
        generation = Generation(sampler, ids, finish, token_seconds=pace, seconds=reply.seconds)
        return await self._live.run(key, generation, deaf=reply.deaf)

    async def _administer(self, http: web.BaseRequest, body: Any) -> web.StreamResponse:
        number, query = next(self._numbers), dict(http.query)
        self.log.add("asked", id=number, path=http.path, query=query, body=body, authorization=http.headers.get("Authorization", ""))
        reply = self._replies.to(facts_of(http.path, None, query, body))
        status = 0
        try:
            if reply.seconds:
                await asyncio.sleep(reply.seconds)
            honest_status, honest = 200, b""
            if reply.carries_out and not (reply.hang or reply.cut or reply.kill):
                honest_status, honest = await self._administration.carry_out(http.path, query, body)
            if reply.is_honest and honest_status != 200:
                reply = Reply(status=honest_status)
            response = await self._send(http, reply, honest, after=0.0)
            status = reply.status
            return response
        finally:
            self.log.add("answered", id=number, path=http.path, status=status, paused=self.paused)

    async def _send(self, http: web.BaseRequest, reply: Reply, honest: bytes, *, after: float) -> web.StreamResponse:
        if reply.kill:
            await self._die()
        return await send(http, reply, honest, after=after)

    async def _die(self) -> None:
        if self._dies is not None:
            self.log.add("killed")
            self._dies()
        task = asyncio.create_task(self.kill(), name="killed by its script")
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)

    async def _until_idle(self) -> None:
        await self.until(lambda: not self._live.are_writing, limit=600)
