"""How a run ends: signals, limits, what is on disk before anything is closed, and the exit code.

The order of an end: the run drains, or is stopped; the journal is closed and `run.json` says how it ended; only then are workers, engines,
trainer and exporters closed, all at once and within `run.shutdown_seconds`. Each step has a limit, kept by a thread: an end that is wedged
before the final state is on disk exits with an error that names what hung, one that is wedged afterwards exits as the run did, with a
warning. What has not closed is killed.

SIGINT and SIGTERM ask the run to drain; a second one, or one that comes before it runs, stops it now; a third kills it, and so does the
second where the event loop is blocked for longer than the stop may take. `run.stop_before_seconds` asks for the drain as SIGTERM does.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.adapters.loop_watch import LoopWatch
from headway.adapters.process_group import kill_all
from headway.errors import HeadwayError, Stalled, StorageError, first_cause, kind_of
from headway.events import Ended
from headway.formats.run_directory import Ending
from headway.launch.closers import Closers
from headway.launch.events_log import logged_to
from headway.launch.fuse import Fuse, waiting_tasks, within
from headway.launch.interrupts import SIGNALS, Interrupted, stopped_by
from headway.launch.telling import parts_told, show, tell, tell_last
from headway.orchestrator import Orchestrator
from headway.protocols import Entry, Journal
from headway.secrecy import concealed
from headway.settings import Config

_log = logging.getLogger("headway")
_BEGAN = time.monotonic()  # about when the process began: run.stop_before_seconds counts from here
_KILLED_CODE = 1  # of an end that was wedged before it was on disk
_WORDS_SECONDS = 3.0  # for a log and a disk that may hang themselves
_LEAVE_SECONDS = 5.0  # for the loop to close, beyond the closers' limit

Main = Callable[["Ends"], Coroutine[Any, Any, str]]


class Ends:
    """The end of one run. `closers`: what is to be closed once its final state is on disk; `journal`: closed before, when there is one.

    `save` writes the ending into run.json; it may raise StorageError.
    """

    def __init__(self, config: Config, *, path: Path, log: Path, save: Callable[[Ending], None]) -> None:
        self._run = config.run
        self._cleanup_seconds = config.environment.cleanup_seconds
        self.path = path
        self._events_log = log
        self._save = save
        self.closers = Closers()
        self.journal: Journal | None = None
        self.loop = LoopWatch(report=self._blocked, stuck=self._stuck, stuck_seconds=self._stuck_seconds)
        self._fuse = Fuse(self._burnt)
        self._signals: list[signal.Signals] = []
        self._heeded = 0
        self._asked: tuple[str, int] | None = None  # to end: what asked, and the exit code that this means
        self._by_time = False  # it was run.stop_before_seconds
        self._stopping = False  # everything is being cancelled: there is no drain any more
        self._orchestrator: Orchestrator | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[Any] | None = None
        self._until_drain: asyncio.Task[None] | None = None
        self._closing = False
        self._code = _KILLED_CODE  # what a fuse that burns exits with
        self._saved = False

    @property
    def _stuck_seconds(self) -> float:
        return self._run.stall_seconds if self._run.on_stall == "exit" else 0.0

    # -------------------------------------------------------------------------------------------------------- from the start to the end

    def play(self, main: Main) -> int:
        """Play `main` to its end; return the exit code: 0, or 130 / 143 when the run was asked to end. Raises what ended it otherwise."""
        try:
            with logged_to(self._events_log), parts_told():
                code, cause, error = self._played(main)
        finally:
            self._fuse.defuse()
        if error is not None:
            raise error
        last = f"{cause}. The run is in {self.path}"
        within(_WORDS_SECONDS, lambda: print(last, flush=True))  # noqa: T201  who reads may have gone, or stand still; run.json tells it too
        return code

    def _played(self, main: Main) -> tuple[int, str, BaseException | None]:
        # Rollouts in flight are many objects that live for seconds: by default the collector would walk all of them again and
        # again (half of the orchestrator's time at 8,192 in flight).
        gc.freeze()
        gc.set_threshold(20_000, 50, 100)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            loop = runner.get_loop()
            for number in SIGNALS:
                # not the loop's own handlers: these are called where the loop is blocked, too
                signal.signal(number, lambda number, _: self._signalled(signal.Signals(number), loop))
            return runner.run(self._play(main))

    async def _play(self, main: Main) -> tuple[int, str, BaseException | None]:
        self._loop = asyncio.get_running_loop()
        watching = asyncio.create_task(self.loop.run(), name="loop watch")
        self._main = asyncio.create_task(main(self), name="run")
        self._hear()  # a signal may have come before there was anything to stop
        if limit := self._run.stop_before_seconds:
            self._at(max(limit - self._cleanup_seconds - self._run.shutdown_seconds, limit / 2), self._time_is_over)
        cause = ""
        error: BaseException | None = None
        try:
            cause = await self._main
        except asyncio.CancelledError:
            error = self._interrupted()
        except Exception as raised:  # noqa: BLE001  recorded in run.json, then raised on
            error = raised
        self._main, self._closing = None, True
        if self._until_drain is not None:
            self._until_drain.cancel()
        self._limit(self._run.shutdown_seconds, "the journal and run.json were to be written within run.shutdown_seconds")
        code, cause, error = await self._make_durable(cause, error)
        self._saved, self._code = True, code
        self._limit(self._run.shutdown_seconds + _LEAVE_SECONDS, "it was to be left within run.shutdown_seconds")
        await self._close()
        self._limit(_LEAVE_SECONDS, "the event loop was to be left")
        watching.cancel()
        return code, cause, error

    async def _make_durable(self, cause: str, error: BaseException | None) -> tuple[int, str, BaseException | None]:
        """Close the journal and write how it ended; return that."""
        code, cause, error = _verdict(cause, error, 0 if self._asked is None else self._asked[1])
        try:
            if self.journal is not None:
                if error is not None and self._orchestrator is not None:
                    with suppress(StorageError):  # a journal that cannot be written may be what ended the run
                        await self.journal.append([Entry(Ended(time.time(), code, cause))])
                await self.journal.close()
            self._save(Ending(code, cause, time.time(), kind_of(error) if error else ""))
        except StorageError as unsaved:
            if error is None:
                code, cause, error = _verdict("", unsaved, 0)
                with suppress(StorageError):
                    self._save(Ending(code, cause, time.time(), unsaved.kind))
            else:
                error.add_note(str(unsaved))  # a full disk may be behind both: what ended the run is told
        _log.info("ended with exit code %d: %s", code, cause, exc_info=None if isinstance(error, HeadwayError) else error)
        return code, cause, error

    async def _close(self) -> None:
        limit = self._run.shutdown_seconds
        hung = await self.closers.close_all(limit)
        kill_all()  # also what user code has left behind elsewhere
        if hung:
            tell(f"not closed within run.shutdown_seconds ({limit:g} s), and left or killed: {', '.join(hung)}")

    # ------------------------------------------------------------------------------------------------------------------ what ends a run

    def runs(self, orchestrator: Orchestrator) -> None:
        """From here on the run can drain. Raises Interrupted where it was asked to end before."""
        if self._asked is not None:
            raise self._interrupted()
        self._orchestrator = orchestrator
        self._until_drain = asyncio.create_task(self._limit_when_draining(orchestrator), name="limit of the drain")
        if self._run.stop_before_seconds:
            reserve = self._run.drain_timeout_seconds + self._run.shutdown_seconds
            due = self._run.stop_before_seconds - reserve
            self._at(due, self._time_is_up)

    def failing(self, error: BaseException) -> None:
        """Hear that the run ends by this error: everything is being cancelled, within a limit."""
        leaf = first_cause(error)
        self._code = leaf.exit_code if isinstance(leaf, Stalled) else _KILLED_CODE
        self._limit_stop(f"after {type(leaf).__name__} ({leaf})")

    def _time_is_up(self) -> None:
        if self._asked is not None:
            return
        self._by_time = True
        seconds = f"run.stop_before_seconds ({self._run.stop_before_seconds:g} s)"
        self._ask(f"{seconds} is near: saved, to be taken up again with --resume", 128 + signal.SIGTERM, said=seconds)

    def _time_is_over(self) -> None:
        if self._main is not None:  # it has not drained, or not even begun: what is durable is taken up again
            self._by_time = True
            self._asked = self._asked or ("", 128 + signal.SIGTERM)
            self._limit_stop("run.stop_before_seconds")
            self._main.cancel()

    @staticmethod
    def _at(seconds: float, call: Callable[[], None]) -> None:
        """Have `call` called when the process is so old; at once if it is older."""
        asyncio.get_running_loop().call_later(max(0.0, seconds - (time.monotonic() - _BEGAN)), call)

    def _signalled(self, number: signal.Signals, loop: asyncio.AbstractEventLoop) -> None:
        """Take a signal, in the main thread, wherever it is."""
        self._signals.append(number)
        count = len(self._signals) + self._by_time
        if count == 1 and self._orchestrator is not None:
            self._limit_drain(number.name)
        elif count <= 2:
            self._limit_stop(number.name)
        else:
            self._code = self._code if self._saved else 128 + self._signals[0]
            self._limit(0.0, f"{number.name} once more")
        with suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(self._hear)

    def _hear(self) -> None:
        """Act on the signals that have come, on the loop."""
        while self._heeded < len(self._signals) and (self._main is not None or self._closing):
            number = self._signals[self._heeded]
            self._heeded += 1
            if self._main is None:
                if self._heeded > 1:
                    self.closers.cut_short()
            elif self._asked is None and self._heeded == 1:
                self._ask(f"interrupted by {number.name}", 128 + number, said=number.name)
            else:
                self._main.cancel()

    def _ask(self, reason: str, code: int, *, said: str) -> None:
        """Ask the run to end: in order if it runs, at once otherwise."""
        if self._main is None:
            return
        ending = "" if self._orchestrator is None else self._orchestrator.ledger.draining
        if not ending:
            self._asked = (reason, code)
        if self._orchestrator is None:
            self._main.cancel()
            return
        self._limit_drain(said)
        _log.warning("%s: draining (at most %g s); a signal stops it now", said, self._run.drain_timeout_seconds)
        if not ending:  # a run that has reached its end is not interrupted by somebody who asks for it
            self._orchestrator.drain(reason, code)
        show(f"\n{said}: draining; once more stops now")

    def _interrupted(self) -> Interrupted:
        if self._signals:
            return stopped_by(self._signals[0])
        return Interrupted("run.stop_before_seconds" if self._by_time else "a cancellation", self._asked[1] if self._asked else 1)

    # -------------------------------------------------------------------------------------------------------------------- limits, wedges

    async def _limit_when_draining(self, orchestrator: Orchestrator) -> None:
        self._limit_drain(await orchestrator.until_draining())

    def _limit_drain(self, asked_by: str) -> None:
        if not self._stopping:  # what began to drain and is stopped by now has the limit of a stop
            seconds = self._run.drain_timeout_seconds + self._cleanup_seconds + self._run.shutdown_seconds
            self._limit(seconds, f"{asked_by}: the run was to drain")

    def _limit_stop(self, asked_by: str) -> None:
        self._stopping = True
        self._limit(self._cleanup_seconds + self._run.shutdown_seconds, f"{asked_by}: everything was to be stopped")

    def _limit(self, seconds: float, why: str) -> None:
        self._fuse.set(seconds, f"{why} (limit {seconds:g} s)")

    def _blocked(self, text: str) -> None:
        within(_WORDS_SECONDS, lambda: tell(concealed(text)))

    def _stuck(self, text: str) -> None:
        self._code = Stalled.exit_code
        self._burnt(f'run.on_stall = "exit": {text.partition(":")[0]}')

    def _burnt(self, why: str) -> None:
        """End the process now: in a thread, with a loop that may be blocked and a disk that may hang."""
        code = self._code
        if blocked_at := self.loop.blocked_at():
            why = f"{why}; the event loop is blocked at {blocked_at}"
        elif self._loop is not None:
            why = f"{why}; waiting: {waiting_tasks(self._loop)}"
        text = concealed(f"killed: {why}")
        if not self._saved:
            within(_WORDS_SECONDS, lambda: self._save(Ending(code, text, time.time())))
        within(_WORDS_SECONDS, lambda: tell_last(f"{text}; exit code {code}"))
        kill_all()
        os._exit(code)


def _verdict(cause: str, error: BaseException | None, code: int) -> tuple[int, str, BaseException | None]:
    """Return exit code, cause in one line, and the error to raise on, if any."""
    if error is None:
        return code, cause, None
    leaf = first_cause(error)
    code = leaf.exit_code if isinstance(leaf, HeadwayError) else 1
    return code, concealed(f"{type(leaf).__name__}: {leaf}".partition("\n")[0]), leaf if isinstance(leaf, HeadwayError) else error


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
