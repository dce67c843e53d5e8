"""Generates at engines of any kind: token ids in; token ids, log-probabilities and version spans out.

One client per worker process, any number of generations at once. An engine that is busy (429, 503) or cannot be reached is asked again
after a bounded, jittered back-off; an answer that the engine aborted is continued with what it wrote so far and what is left of the budget.
When that was of no use, a generation whose engine is lost goes on at another one, with what it has, if the caller knows one (`move`).
Otherwise the failure is not retryable: it was tried here, turn by turn, and is not multiplied by further attempts (where the engine is
lost, the attempt is moved all the same). Every other refusal fails at once, and may be attempted again. Cancelling a generation frees its
slot in the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections.abc import Sequence

from msgspec.structs import replace

from headway.adapters.engines.generation import (
    MOST_ANSWER_BYTES,
    MOST_TOKEN_BYTES,
    Ask,
    ContextExceeded,
    Dialect,
    Generated,
    GenerationFailed,
    Labels,
    Part,
    context_in,
    excerpt,
    is_context_error,
)
from headway.adapters.engines.http import MAX_BODY_BYTES, BadResponse, ConnectionFailed, HttpPool, Response
from headway.adapters.engines.in_flight import InFlight
from headway.adapters.engines.served import Served, lacks_adapter
from headway.adapters.engines.written import Written
from headway.protocols import Move
from headway.types import EngineAddress, SamplingParams

_BACKOFF_SECONDS = 0.1  # doubled per try
_LONGEST_BACKOFF_SECONDS = 5.0
_LONGEST_RETRY_AFTER_SECONDS = 60.0
_REFITS = 4  # what one request may be put otherwise: another route, another adapter, twice a smaller budget
_SEED_STRIDE = 0x9E3779B97F4A7C15  # splitmix64's increment: parts of one generation draw from streams of their own
_SEED_MASK = (1 << 63) - 1


class EngineClient:
    """Generates at any engine of one run; `lineage` is the run's, and weights of another are refused.

    `retries` bounds how often one request is sent again while the engine is busy or out of reach, `empty_aborts` how often in a row the
    engine may abort a generation without having written a token.
    """

    def __init__(self, lineage: str, *, retries: int = 4, empty_aborts: int = 8, connect_timeout_seconds: float = 5.0) -> None:
        self._labels = Labels(lineage)
        self._retries = retries
        self._empty_aborts = empty_aborts
        self._http = HttpPool(connect_timeout_seconds=connect_timeout_seconds)
        self._sender = secrets.token_hex(4)
        self._sends = itertools.count()
        self._served: dict[EngineAddress, Served] = {}
        self._jitter = random.Random()  # noqa: S311 -- spreads retries, hides nothing

    async def generate(
        self,
        engine: EngineAddress,
        token_ids: list[int],
        sampling: SamplingParams,
        *,
        seed: int,
        max_tokens: int,
        request_id: str,
        stop_token_ids: Sequence[int] = (),
        lora: bool = False,
        move: Move | None = None,
        in_flight: InFlight | None = None,
    ) -> Generated:
        """Let the engine continue `token_ids` by 1 to `max_tokens` tokens; `sampling.max_tokens` is not looked at.

        `move` is asked where to go on when the engine is lost, each time; None: the failure counts. `in_flight`: whoever has it can give
        requests up that an engine does not answer, which then is lost. Raises `GenerationFailed`, whose `cause` and `retryable` say how a
        rollout ends by it, and `ContextExceeded` where not one token fits.
        """
        written = Written(self._empty_aborts)
        parts = 0
        while len(ids := written.so_far.token_ids) < max_tokens:
            ask = Ask(
                request_id,
                token_ids + ids if ids else token_ids,
                max_tokens - len(ids),
                sampling.temperature,
                sampling.top_p,
                sampling.top_k,
                (seed + parts * _SEED_STRIDE) & _SEED_MASK,
                stop_token_ids,
            )
            try:
                part = await self._part(engine, ask, lora=lora, in_flight=in_flight)
            except ContextExceeded:
                if not ids:
                    raise
                break  # the engine that it has come to holds less than the one before
            except GenerationFailed as error:
                error.sampled_tokens += len(ids)
                elsewhere = await move(engine) if move is not None and error.lost else None
                if elsewhere is None:
                    raise
                engine = elsewhere
                continue
            parts += 1
            finish = written.add(part, engine.url)
            if finish != "abort":
                return written.whole(finish)
            if written.empty:
                await asyncio.sleep(self._backoff(written.empty - 1))
        return written.whole("length")

    async def close(self) -> None:
        """Close idle connections; idempotent."""
        await self._http.close()

    async def _part(self, engine: EngineAddress, ask: Ask, *, lora: bool, in_flight: InFlight | None) -> Part:
        served = self._served.get(engine)
        if served is None:
            served = self._served[engine] = Served(engine, self._labels, self._http)
        if in_flight is None:
            return await self._send(served, ask, lora=lora)
        try:
            async with in_flight.request():
                return await self._send(served, ask, lora=lora)
        except TimeoutError as error:
            raise GenerationFailed(f"{engine.url} hangs and is given up", lost=True) from error

    async def _send(self, served: Served, ask: Ask, *, lora: bool) -> Part:
        """Send a request until it is answered, as often as that is allowed; `served` may learn from refusals how to put it otherwise."""
        tries = refits = 0
        while True:
            tries += 1
            # ids are unique per sending: what broke off may still be in flight at the engine, and runs may share one
            unique = replace(ask, request_id=f"{ask.request_id}-{self._sender}-{next(self._sends):x}")
            dialect = served.dialect  # others may learn of another one meanwhile
            address = served.engine.url + dialect.path
            try:
                sent, stamps = await served.prepare(unique, lora=lora)
                most = min(MAX_BODY_BYTES, MOST_ANSWER_BYTES + MOST_TOKEN_BYTES * sent.max_tokens)
                response = await self._http.request("POST", address, dialect.encode(sent), most=most)
            except BadResponse as error:
                raise GenerationFailed(f"{address}: {error}") from error
            except ConnectionFailed as error:
                served.forget()
                if tries > self._retries:
                    raise GenerationFailed(f"{address}, tried {tries} times: {error}", retryable=False, lost=True) from error
                await asyncio.sleep(self._backoff(tries - 1))
                continue
            if response.status == 200:
                part = dialect.read(response.body, sent, stamps)
                if part.named and part.token_ids:
                    served.names_versions = served.dialect is dialect
                return part
            if refits < _REFITS and self._refit(served, dialect, sent, response):
                refits += 1
                tries -= 1
                continue
            await asyncio.sleep(self._wait_after(address, response, tries))

    @staticmethod
    def _refit(served: Served, used: Dialect, sent: Ask, response: Response) -> bool:
        """Whether a refusal has taught something about the server, by which the request can be put otherwise at once."""
        if served.learn_route(used, response):
            return True
        if sent.model and lacks_adapter(response):
            return True  # the newest is asked for by then
        return response.status == 400 and is_context_error(response.body) and served.learn_room(sent, context_in(response.body))

    def _wait_after(self, address: str, response: Response, tries: int) -> float:
        """Return how long to wait before the request is sent again; raises when it is not to be."""
        status = response.status
        said = f"{address} answered {status}: {excerpt(response.body)}"
        if status == 400 and is_context_error(response.body):
            raise ContextExceeded(said)
        if status not in {429, 503}:
            raise GenerationFailed(said, retryable=status >= 500, lost=status >= 500)
        if tries > self._retries:
            raise GenerationFailed(f"{said} (tried {tries} times)", retryable=False, lost=status == 503)
        try:
            asked = min(float(response.retry_after), _LONGEST_RETRY_AFTER_SECONDS)
        except ValueError:  # absent, or a date: our own back-off serves as well
            asked = 0.0
        return max(asked, self._backoff(tries - 1)) if asked >= 0 else self._backoff(tries - 1)

    def _backoff(self, exponent: int) -> float:
        return min(_BACKOFF_SECONDS * 2.0**exponent, _LONGEST_BACKOFF_SECONDS) * self._jitter.uniform(0.5, 1.0)
