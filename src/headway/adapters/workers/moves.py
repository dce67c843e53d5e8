"""The attempts in one worker process that may go on at another engine, and what they ask.

A question is a task that lives no longer than the attempt: it may wait for long, until an engine serves. It is answered by `moved`; an
error in answering is the call's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headway.errors import WorkerFailed
from headway.formats.wire import GiveUp, Move, Moved, ToWorker
from headway.protocols import Mover


class Moves:
    """`send`: to the process. `failed`: hears of a call whose question could not be answered, and why."""

    def __init__(self, *, send: Callable[[ToWorker], None], failed: Callable[[int, BaseException], None]) -> None:
        self._send = send
        self._failed = failed
        self._movers: dict[int, Mover] = {}
        self._questions: dict[int, asyncio.Task[None]] = {}

    def allow(self, call: int, mover: Mover) -> None:
        """Let an attempt ask where to go on, and tell it of an engine that hangs."""
        self._movers[call] = mover
        mover.when_it_hangs(lambda moves: self._send(GiveUp(call, moves)))

    def refuse(self, call: int) -> None:
        """Let an attempt move no more: what it asks, or has asked, is answered by no."""
        self._movers.pop(call, None)
        question = self._questions.pop(call, None)
        if question is not None:
            question.cancel()
            self._send(Moved(call, None))

    def ask(self, question: Move) -> None:
        """Find the answer to a question of a call that is under way. Raises `WorkerFailed` for one that has asked already."""
        call = question.call
        if call in self._questions:
            raise WorkerFailed(f"call {call} asks for a move while it is being moved")
        mover = self._movers.get(call)
        if mover is None:
            self._send(Moved(call, None))
        else:
            task = self._questions[call] = asyncio.create_task(self._answer(mover, question), name=f"move of call {call}")
            task.add_done_callback(lambda task: self._ended(call, task))

    async def _answer(self, mover: Mover, question: Move) -> None:
        engine = await mover(question.failed)
        self._questions.pop(question.call, None)
        self._send(Moved(question.call, engine))  # before anything else happens: what is told after it is of the new engine

    def _ended(self, call: int, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(call, error)
