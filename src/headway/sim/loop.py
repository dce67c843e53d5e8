"""An asyncio event loop on virtual time: whole runs are played in milliseconds, the same every time.

The clock starts at 0 and moves only when nothing is left to do at this instant: then it jumps to the next timer. Computing takes no time.
Timers that are due at once fire in the order in which they were set, and tasks hash by their number, so that the sets in which asyncio
keeps them (a task group that is cancelled, say) have one order too: the same program plays the same history, in any process. A seed plays
another one: callbacks that are ready together then run in a random order, drawn from the seed.

Every rollout costs a task and a handful of callbacks, so they are kept cheap: what is only of use to debuggers is done in debug mode alone.

There is no world outside: threads, sockets, processes and signals raise `OutsideWorld`. What would hang raises instead, and names the tasks
that wait and where: `Deadlock` when nothing is scheduled, `NoEnd` when the clock passes its limit or stands still for ever.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from math import inf
from typing import Any, NoReturn, TypeVar

from headway.errors import HeadwayError
from headway.waiting import place_of

Result = TypeVar("Result")

_FEW_TIMERS = 128  # below this, cancelled timers are not worth sweeping


class Deadlock(HeadwayError):
    """Every task waits, and nothing is scheduled that could wake one."""


class NoEnd(HeadwayError):
    """The clock passed its limit, or tasks keep each other busy without ever letting it move."""


class OutsideWorld(HeadwayError):
    """Something asked virtual time for a thread, a socket, a process or a signal."""


def run(main: Coroutine[Any, Any, Result], *, seed: int | None = None, limit_seconds: float = inf, debug: bool | None = None) -> Result:
    """Run `main` to its end on virtual time, cancel what it leaves behind, and return its result; the twin of `asyncio.run`.

    `seed` None: callbacks run first come, first served, as asyncio has it. `limit_seconds`: virtual time at which `NoEnd` is raised.
    """
    results: list[Result] = []

    async def to_its_end() -> None:
        results.append(await main)

    with asyncio.Runner(debug=debug, loop_factory=lambda: VirtualLoop(seed=seed, limit_seconds=limit_seconds)) as runner:
        runner.run(to_its_end())  # which writes the task's result out as text, in `signal.getsignal`, and a whole history is long
    return results[0]


class _Task(asyncio.Task[Any]):
    """A task that hashes by its number: a set of tasks has the same order in every process."""

    __slots__ = ("_number",)
    _number: int

    def __new__(cls, *_: Any, loop: VirtualLoop, **__: Any) -> _Task:  # noqa: PYI034
        task = super().__new__(cls)
        task._number = next(loop.numbers)  # asyncio asks for the hash before the task is initialised
        return task

    def __hash__(self) -> int:
        return self._number


class _Handle(asyncio.Handle):
    """A callback that is ready, without what debugging wants to know."""

    __slots__ = ()

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], loop: VirtualLoop, context: Context | None) -> None:
        self._callback, self._args, self._loop = callback, args, loop
        self._context = copy_context() if context is None else context
        self._cancelled = False
        self._repr = self._source_traceback = None


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop itself; `run` is the usual way to one. `loop.time()` is virtual seconds from 0.

    `limit_rounds`: rounds of callbacks without the clock moving, after which it is held that it never will.
    """

    _ready: deque[Any]  # what BaseEventLoop keeps: callbacks to run, and the wish to stop
    _stopping: bool
    _closed: bool
    _debug: bool
    _task_factory: object
    _check_closed: Callable[[], None]

    def __init__(self, *, seed: int | None = None, limit_seconds: float = inf, limit_rounds: int = 1_000_000) -> None:
        super().__init__()
        self.numbers = itertools.count()
        self._now = 0.0
        self._limit = self._limit_seconds = limit_seconds
        self._limit_rounds = limit_rounds
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_numbers = itertools.count()
        self._cancelled_timers = 0
        self._rounds = 0
        self._random = None if seed is None else random.Random(seed)  # noqa: S311 -- an order, not a secret

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def create_task(self, coroutine: Any, **options: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        """Start a task; of a task factory only if somebody has set one."""
        if self._task_factory is not None:
            return super().create_task(coroutine, **options)
        self._check_closed()
        return _Task(coroutine, loop=self, **options)

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        """Run `callback` in the next round."""
        if self._debug or self._closed:
            told = super().call_soon(callback, *args, context=context)
            del told._source_traceback[-1]  # type: ignore[attr-defined]  # which is here
            return told
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.TimerHandle:  # type: ignore[override]
        """Run `callback` when the clock reaches `when` (now, if that has passed), after timers set earlier for the same instant."""
        self._check_closed()
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        timer._scheduled = True  # type: ignore[attr-defined]
        heapq.heappush(self._timers, (when, next(self._timer_numbers), timer))
        return timer

    def close(self) -> None:
        """Forget everything that was scheduled."""
        self._timers.clear()
        super().close()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Count a timer that was cancelled before it fired; sweep when they are the most, so that memory follows the living."""
        if not handle._scheduled:  # type: ignore[attr-defined]
            return
        self._cancelled_timers += 1
        if self._cancelled_timers * 2 > len(self._timers) > _FEW_TIMERS:
            self._timers[:] = [entry for entry in self._timers if not entry[2]._cancelled]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0

    def _run_once(self) -> None:
        """Play rounds until somebody stops the loop: what is ready now is run, once the clock has moved if nothing is."""
        ready, timers = self._ready, self._timers
        while True:
            if not ready and not self._stopping:
                self._advance()
            elif timers and timers[0][0] <= self._now:
                self._fire()
            elif self._rounds > self._limit_rounds:
                self._rounds = 0
                raise NoEnd(self._plight(f"the clock stands still at {self._now:g} s: tasks keep each other busy for ever"))
            self._rounds += 1
            if self._random is not None and len(ready) > 1:
                together = list(ready)
                self._random.shuffle(together)
                ready.clear()
                ready.extend(together)
            for _ in range(len(ready)):
                handle = ready.popleft()
                if handle._cancelled:
                    continue
                try:  # as handle._run() does
                    handle._context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001  it is the exception handler's, as everywhere in asyncio
                    self._report(handle, error)
            if self._stopping:
                break

    def _advance(self) -> None:
        """Jump to the next timer, and make ready what is due then."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
            self._cancelled_timers -= 1
        if not timers or timers[0][0] == inf:
            raise Deadlock(self._plight(f"nothing is scheduled at {self._now:g} s, and every task waits"))
        when = timers[0][0]
        if when > self._limit:
            self._limit += self._limit_seconds  # the same time again, for the tasks to clean up
            raise NoEnd(self._plight(f"virtual time passes its limit of {self._limit_seconds:g} s"))
        if when > self._now:
            self._now, self._rounds = when, 0
        self._fire()

    def _fire(self) -> None:
        """Make every timer ready that is due by now."""
        timers, ready, now = self._timers, self._ready, self._now
        while timers and timers[0][0] <= now:
            timer = heapq.heappop(timers)[2]
            timer._scheduled = False  # type: ignore[attr-defined]
            if timer._cancelled:
                self._cancelled_timers -= 1
            else:
                ready.append(timer)

    def _report(self, handle: Any, error: BaseException) -> None:
        context = {"message": f"Exception in callback {handle!r}", "exception": error, "handle": handle}
        if handle._source_traceback:
            context["source_traceback"] = handle._source_traceback
        self.call_exception_handler(context)

    def _plight(self, what: str) -> str:
        """Say what is wrong and which tasks wait where, in the order in which they were made."""
        waiting = [f"{task.get_name()} ({place_of(task)})" for task in sorted(asyncio.all_tasks(self), key=hash)]
        return f"{what}; waiting: {', '.join(waiting) or 'no task'}"

    def _write_to_self(self) -> None:
        """Nothing sleeps that would have to be woken: a signal handler's callback is found in the next round."""


def _outside(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise OutsideWorld(f"{name}: virtual time has no threads, sockets, processes or signals; use an in-memory adapter of headway.sim")

    refuse.__name__ = name
    return refuse


for _name in (
    *("run_in_executor", "set_default_executor", "getaddrinfo", "getnameinfo", "add_signal_handler", "remove_signal_handler"),
    *("add_reader", "remove_reader", "add_writer", "remove_writer", "sock_connect", "sock_accept", "sock_recv", "sock_recv_into"),
    *("sock_recvfrom", "sock_recvfrom_into", "sock_sendall", "sock_sendto", "sock_sendfile", "sendfile", "start_tls"),
    *("create_connection", "create_server", "create_datagram_endpoint", "create_unix_connection", "create_unix_server"),
    *("connect_accepted_socket", "connect_read_pipe", "connect_write_pipe", "subprocess_exec", "subprocess_shell"),
):
    setattr(VirtualLoop, _name, _outside(_name))
