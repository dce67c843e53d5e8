"""The one thread that runs the model: takes requests and commands between steps, hands ended requests back once per step.

The event loop never waits for torch, and the model is never touched by two threads. Idle, the thread sleeps on its inbox. If it dies,
everyone who waits is told, and `died` says of what.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from headway.embedded.engine.request import Request
from headway.embedded.engine.scheduler import PauseMode, Scheduler
from headway.errors import EngineFailed

Result = TypeVar("Result")
Command = Callable[[Scheduler], None]


class ModelThread:
    """Runs a scheduler on a thread of its own, for one event loop, on which all methods are called."""

    def __init__(self, build: Callable[[], Scheduler]) -> None:
        """`build` is called on the thread: it loads the model, and its error is that of `ready`."""
        self._build = build
        self._loop = asyncio.get_running_loop()
        self._inbox: SimpleQueue[Request | Command | None] = SimpleQueue()
        self._requests: dict[int, asyncio.Future[Request]] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._pauses: list[asyncio.Future[Any]] = []  # the thread's own: pauses that wait for the last request
        self.ready: asyncio.Future[Scheduler] = self._loop.create_future()
        self.died: asyncio.Future[BaseException] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    async def generate(self, request: Request) -> Request:
        """Return the request once it has ended. Cancelling this call aborts it."""
        self._check()
        future = self._requests[request.key] = self._loop.create_future()
        self._inbox.put(request)
        try:
            return await future
        finally:
            if self._requests.pop(request.key, None) is not None:
                self.abort([request.key])

    def abort(self, keys: list[int]) -> None:
        """End requests early, in the background; who waits for them gets what was written."""
        self.command(lambda scheduler: self._deliver(scheduler.abort(keys)))

    def command(self, act: Command) -> None:
        """Run something between two steps, in the background. What it raises is the end of the engine."""
        self._inbox.put(act)

    async def call(self, action: Callable[[Scheduler], Result]) -> Result:
        """Run an action between two steps and return what it returns, or raise what it raises."""

        def act(scheduler: Scheduler, answer: asyncio.Future[Any]) -> None:
            try:
                result = action(scheduler)
            except Exception as error:  # noqa: BLE001  (the caller's to handle, whatever it is)
                self._post(self._settle, answer, None, error)
            else:
                self._post(self._settle, answer, result, None)

        return await self._ask(act)

    async def pause(self, mode: PauseMode, *, recompute: bool) -> None:
        """Return once nothing is being sampled (scheduler.pause)."""

        def act(scheduler: Scheduler, answer: asyncio.Future[Any]) -> None:
            self._deliver(scheduler.pause(mode, recompute=recompute))
            self._pauses.append(answer)

        await self._ask(act)

    def close(self, *, join_seconds: float) -> None:
        """Let the thread end after the step that it is in, and wait for it."""
        self._inbox.put(None)
        self._thread.join(join_seconds)

    # On the loop ----------------------------------------------------------------------------------------------------------------------

    async def _ask(self, act: Callable[[Scheduler, asyncio.Future[Any]], None]) -> Any:
        self._check()
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._calls.add(answer)
        self.command(lambda scheduler: act(scheduler, answer))
        try:
            return await answer
        finally:
            self._calls.discard(answer)

    def _check(self) -> None:
        if self.died.done():
            raise EngineFailed(f"the model thread died: {self.died.result()}")

    def _settle(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def _resolve(self, finished: list[Request]) -> None:
        for request in finished:
            future = self._requests.pop(request.key, None)
            if future is not None and not future.done():
                future.set_result(request)

    def _fail(self, error: BaseException) -> None:
        self.died.set_result(error)
        failure = EngineFailed(f"the model thread died: {error!r}")
        waiting = [*self._requests.values(), *self._calls]
        self._requests.clear()
        for future in waiting:
            self._settle(future, None, failure)

    # On the thread --------------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            scheduler = self._build()
        except Exception as error:  # noqa: BLE001  (shown by whoever waits for the model)
            self._post(self._settle, self.ready, None, error)
            return
        self._post(self._settle, self.ready, scheduler, None)
        try:
            while self._take(scheduler):
                if scheduler.busy:
                    self._deliver(scheduler.step())
                if self._pauses and (scheduler.paused or scheduler.pausing is None):
                    for answer in self._pauses:
                        self._post(self._settle, answer, None, None)
                    self._pauses.clear()
        except Exception as error:  # noqa: BLE001  (whatever it was, the engine is dead, and says of what)
            self._post(self._fail, error)

    def _take(self, scheduler: Scheduler) -> bool:
        """Take in all that has arrived, sleeping first if there is nothing to do; False: the thread is to end."""
        try:
            item = self._inbox.get(block=not scheduler.busy)
            while item is not None:
                if isinstance(item, Request):
                    scheduler.submit(item)
                else:
                    item(scheduler)
                item = self._inbox.get_nowait()
        except Empty:
            return True
        return False

    def _deliver(self, finished: list[Request]) -> None:
        if finished:
            self._post(self._resolve, finished)

    def _post(self, callback: Callable[..., None], *arguments: Any) -> None:
        if not self._loop.is_closed():  # closed: the process is ending, and nobody waits
            self._loop.call_soon_threadsafe(callback, *arguments)
