"""A rollout worker as a process: takes calls from the wire, runs them on one loop, answers each exactly once.

It ends when it is told to drain, when it is terminated, and when its parent is gone; each time what runs is cancelled, the user's code gets
its clean-up budget, and the process ends within that budget whatever the user's code does. A call that blocks the loop delays its
neighbours and nothing else, until it is cancelled and has used up its budget: nobody takes a silent worker for dead before.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, assert_never, cast

from headway.errors import ConfigError, WorkerFailed
from headway.formats.wire import (
    Alive,
    Attempt,
    Cancel,
    Drain,
    Failed,
    Finished,
    FrameReader,
    FromWorker,
    GiveUp,
    Hello,
    Move,
    Moved,
    ScoreCall,
    Scored,
    Setup,
    ToWorker,
    WorkerSpec,
    decode_to_worker,
    encode_frame,
)
from headway.lifeline import Lifeline, adopt_orphans, descendants, kill_found
from headway.types import Cause, Failure, Rollout, Score
from headway.worker.runtime import Runtime, end_within
from headway.worker.wire_mover import WireMover

_log = logging.getLogger(__name__)
_PULSE_SECONDS = 1.0
_EXIT_SECONDS = 2.0  # beyond the clean-up budget: for interpreter exit and threads that hang
_ORPHAN_SECONDS = 9.0  # whatever the budget: 10 s after the orchestrator nothing of a run is left

Answer = Rollout | Failure | Sequence[Score]


class WorkerServer(asyncio.Protocol):
    """One end of the wire. `ended` is done when the process may exit; `orphaned`: because the orchestrator is gone."""

    def __init__(self, lifeline: Lifeline | None) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.orphaned = False
        self._lifeline = lifeline
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._runtime: Runtime | None = None
        self._cleanup_seconds = 0.0
        self._calls: dict[int, asyncio.Task[Answer]] = {}
        self._movers: dict[int, WireMover] = {}
        self._pulse: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the wire."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Handle every message that is whole."""
        try:
            for body in self._reader.feed(data):
                self._handle(decode_to_worker(body))
        except WorkerFailed:
            _log.exception("the wire brought nonsense: ending")
            self.end()

    def connection_lost(self, exc: Exception | None) -> None:
        """End with the orchestrator."""
        self._transport = None
        if self._ending is None:
            self.orphaned = True
        self.end()

    def end(self) -> None:
        """Cancel what runs, let it clean up, and be done; idempotent."""
        if self._ending is None:
            # a thread that hangs must not hold the process: neither the loop's exit nor the interpreter's waits without limit
            self._leave_later()
            self._ending = self._loop.create_task(self._end(), name="ending")

    def leave(self) -> None:
        """End the process at once."""
        if self.orphaned and os.getpgrp() == os.getpid():  # with what the user's code has started: nobody else is left to do it
            adopt_orphans()  # whose parents are killed first
            kill_found(lambda: descendants(os.getpid()))
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(0)

    def _leave_later(self) -> None:
        limit = self._cleanup_seconds + _EXIT_SECONDS
        killer = threading.Timer(min(limit, _ORPHAN_SECONDS) if self.orphaned else limit, self.leave)
        killer.daemon = True
        killer.start()

    def _lost_parent(self) -> None:
        self.orphaned = True
        self._leave_later()  # not from the loop: the user's code may block it
        self._loop.call_soon_threadsafe(self.end)

    async def _end(self) -> None:
        if self._pulse is not None:
            self._pulse.cancel()
        ended = await asyncio.gather(*(end_within(task, self._cleanup_seconds) for task in self._calls.values()))
        if not all(ended):
            _log.warning("%d calls had not cleaned up after %g s: left behind", ended.count(False), self._cleanup_seconds)
        if self._runtime is not None:
            await self._runtime.close()
        if self._transport is not None:
            self._transport.close()
        self.ended.set_result(None)

    def _handle(self, message: ToWorker) -> None:
        match message:
            case Setup(spec):
                self._set_up(spec)
            case Attempt(call, request, moves):
                if runtime := self._ready(call):
                    self._start(call, runtime.attempt(request, self._mover(call) if moves else None))
            case ScoreCall(call, request):
                if runtime := self._ready(call):
                    self._start(call, runtime.score(request))
            case Cancel(call):
                self._cancel(call)
            case Moved(call, engine):
                if mover := self._movers.get(call):
                    mover.moved(engine)
            case GiveUp(call, moves):
                if mover := self._movers.get(call):
                    mover.hangs(moves)
            case Drain():
                self.end()
            case _:
                assert_never(message)

    def _set_up(self, spec: WorkerSpec) -> None:
        self._cleanup_seconds = spec.cleanup_seconds
        if self._lifeline is not None:
            self._lifeline.watch(self._lost_parent, grace_seconds=_ORPHAN_SECONDS)
        try:
            self._runtime = Runtime.load(spec)
        except ConfigError as error:
            self._send(Hello(str(error), error.detail))
            return
        gc.freeze()  # modules and tokenizer stay: no collection need look at them again
        self._pulse = self._loop.create_task(self._beat(), name="pulse")
        self._send(Hello())

    def _ready(self, call: int) -> Runtime | None:
        """Return what runs calls, or refuse this one: it came before `setup` or after `drain`."""
        if self._runtime is not None and self._ending is None:
            return self._runtime
        self._send(Failed(call, Failure("cancelled", "the worker is ending", retryable=True)))
        return None

    def _mover(self, call: int) -> WireMover:
        mover = self._movers[call] = WireMover(lambda failed: self._send(Move(call, failed)))
        return mover

    def _start(self, call: int, work: Coroutine[Any, Any, Answer]) -> None:
        task = self._loop.create_task(work)
        self._calls[call] = task
        task.add_done_callback(functools.partial(self._answer, call))

    def _answer(self, call: int, task: asyncio.Task[Answer]) -> None:
        del self._calls[call]
        self._movers.pop(call, None)
        if task.cancelled():
            self._send(Failed(call, Failure("cancelled", "cancelled", retryable=False)))
            return
        match task.result():
            case Rollout() as rollout:
                self._send(Finished(call, rollout))
            case Failure() as failure:
                self._send(Failed(call, failure))
            case scores:
                self._send(Scored(call, scores))

    def _cancel(self, call: int) -> None:
        task = self._calls.get(call)
        if task is not None:
            task.cancel()
            self._loop.call_later(self._cleanup_seconds, self._cut, call)

    def _cut(self, call: int) -> None:
        task = self._calls.get(call)
        if task is not None:
            _log.warning("an environment had not cleaned up %g s after it was cancelled: its clean-up is cancelled", self._cleanup_seconds)
            task.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_PULSE_SECONDS)
            self._send(Alive())

    def _send(self, message: FromWorker) -> None:
        if self._transport is None:
            return
        try:
            frame = encode_frame(message)
        except WorkerFailed as error:  # whoever waits for the call must hear of it
            if not isinstance(message, (Finished, Failed, Scored)):
                raise
            cause: Cause = "score_error" if isinstance(message, Scored) else "environment_error"
            frame = encode_frame(Failed(message.call, Failure(cause, ascii(str(error))[1:-1], retryable=False)))
        self._transport.write(frame)


async def serve(wire: socket.socket) -> None:
    """Serve one orchestrator over `wire` until it is over. With the orchestrator gone, this ends the process."""
    loop = asyncio.get_running_loop()
    lifeline = Lifeline.from_environment()
    _, server = await loop.create_unix_connection(lambda: WorkerServer(lifeline), sock=wire)
    loop.add_signal_handler(signal.SIGTERM, server.end)
    await server.ended
    if server.orphaned:
        server.leave()
