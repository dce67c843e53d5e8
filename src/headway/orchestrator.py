"""The orchestrator runs the components of a run (`headway.components`), and orders its end. It decides nothing else.

A run ends when its steps are trained, its reward is reached, its prompts are used up, or somebody asks (`drain`). Then: no further group is
admitted; rollouts in flight finish and are kept; what is formed is trained and published; the last version is evaluated; all of it within
`drain_timeout_seconds`, but for the clean-up of user code that is cancelled then. Groups that do not finish in time are dropped when the
run is over; when it was interrupted (an exit code other than 0) they stay in flight in the journal, and whoever takes the run up goes on
with them. An error anywhere cancels everything and travels with its cause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from headway.components import Components
from headway.errors import EmptyBatches, RunFailed
from headway.events import Draining, Ended
from headway.parts import Parts, Sections, Service
from headway.rules.admission import CapacityReason
from headway.rules.scheduling import run_is_complete, why_barren
from headway.rules.view import LedgerView

_log = logging.getLogger("headway")

IN_FLIGHT_SHARE = 0.5  # of the drain's time, for rollouts in flight; the rest is for training and evaluating what is formed

__all__ = ["Orchestrator", "Parts", "Sections"]


class Orchestrator:
    """One run, from its first admission to its end."""

    def __init__(self, parts: Parts, sections: Sections) -> None:
        self._parts = parts
        self._run = run = sections.run
        self._publish_lag = sections.debug.publish_lag
        self._most_barren = (
            sections.rollout.groups_per_batch * run.max_empty_batches
        )  # not of Bmin: a batch sized by tokens takes many times that
        self._components = Components(parts, sections)
        self._watch = self._components.watch
        self._record = self._components.recorder.record
        self._asked_to_drain = ""
        self._code = 0
        self._drain_deadline = float("inf")

    @property
    def ledger(self) -> LedgerView:
        """The run's state, read only."""
        return self._watch.now

    def pause(self) -> None:
        """Start no further group until `resume`; what is in flight goes on, and training with it."""
        self._components.gate.pause()

    def resume(self) -> None:
        """Start groups again."""
        self._components.gate.resume()

    def drain(self, reason: str, code: int = 0) -> None:
        """Ask the run to end in order, for this reason and with this exit code; what is in flight finishes first."""
        if not self._asked_to_drain:
            self._asked_to_drain, self._code = reason, code
            self._watch.touch()

    async def until_draining(self) -> str:
        """Wait until the run drains, asked to or by itself; return why."""
        await self._watch.until(lambda now: bool(now.draining))
        return self._watch.now.draining

    async def follow(self, look: Callable[[LedgerView, CapacityReason], bool]) -> None:
        """Show `look` the ledger, and why no group may start ("open": one may), whenever something has changed, until it returns True."""
        await self._watch.until(lambda now: look(now, self._components.gate.reason), slots=True)

    async def run(self) -> str:
        """Play the whole run; return why it ended. Raises the tree of `headway.errors`, inside exception groups.

        What the parts hold open is for who made them to close, exporters too: once the run's end is on disk.
        """
        async with asyncio.TaskGroup() as outer:
            await self._awaited(partial(self._play, outer))
        return self._watch.now.draining

    async def _play(self, outer: asyncio.TaskGroup) -> None:
        joined = self._components
        writer = self._start(outer, joined.recorder.run, "recorder")
        background = [self._start(outer, service) for service in [joined.watchdog.run, *joined.supervision]]
        await joined.fleet.start(self._parts.first)
        background += [self._start(outer, service) for service in [*joined.beside, self._guard, self._say_served]]
        evals = self._start(outer, joined.evals.run, "eval sink") if joined.evals else None
        await self._path()
        await self._settle(evals)
        self._record(Ended(self._parts.clock(), self._code, self._watch.now.draining))
        for task in background:
            task.cancel()
        await asyncio.wait(background)  # the metrics loop's last row comes before the end
        joined.recorder.close()
        await writer

    async def _say_served(self) -> None:
        await self._components.fleet.pool.until_serving()
        self._parts.served()

    def _start(self, group: asyncio.TaskGroup, service: Service, name: str = "") -> asyncio.Task[None]:
        return group.create_task(self._awaited(service), name=name or _name(service))

    async def _path(self) -> None:
        async with asyncio.TaskGroup() as path:
            stages = [self._start(path, stage) for stage in self._components.path]
            self._start(path, partial(self._drain_at_the_end, stages), "drain")

    async def _drain_at_the_end(self, stages: Sequence[asyncio.Task[None]]) -> None:
        """Wait for the end of the run, declare the drain, and bound what is in flight.

        A run that was asked to end leaves a batch that the trainer does not finish in time to whoever takes the run up again.
        """
        await self._watch.until(lambda _: bool(self._why_end()))
        loop = asyncio.get_running_loop()
        seconds = self._run.drain_timeout_seconds
        self._drain_deadline = loop.time() + seconds
        self._record(Draining(self._parts.clock(), self._why_end()))
        try:
            async with asyncio.timeout(seconds * IN_FLIGHT_SHARE):
                await self._watch.until(lambda now: not now.running)
        except TimeoutError:
            self._cut_short(f"still running {seconds * IN_FLIGHT_SHARE:g} s after the run began to drain")
        if not await self._in_time(lambda now: now.trained == now.next_batch, "the trainer has not finished the last batch"):
            for stage in stages:
                stage.cancel()

    def _cut_short(self, detail: str) -> None:
        """End what is in flight: for good when the run is over; of one that was interrupted, the next process goes on with it."""
        dispatcher, scorer = self._components.dispatcher, self._components.scorer
        if self._code:
            dispatcher.leave_all()
        else:
            dispatcher.cancel_all(detail)
        if scorer is not None:
            (scorer.leave_all if self._code else scorer.cancel_all)()

    def _why_end(self) -> str:
        return self._asked_to_drain or run_is_complete(self._watch.now, self._run.steps, self._run.finish_when)

    async def _settle(self, evals: asyncio.Task[None] | None) -> None:
        """Publish the last version and evaluate it."""
        ledger = self._watch.now
        await self._in_time(lambda now: now.version >= now.trained - self._publish_lag, "an engine does not serve the last version yet")
        if ledger.trained == 0 and not self._asked_to_drain:
            raise EmptyBatches(f"the prompts are used up and nothing could be trained: {why_barren(ledger)}")
        if evals is None or self._components.evals is None:
            return
        try:  # everything that matters is durable: an evaluation that does not fit is no failure of the run
            async with asyncio.timeout_at(self._drain_deadline):
                await self._watch.until(lambda now: now.eval_running is None)
                evals.cancel()
                if ledger.last_eval != ledger.version:
                    await self._components.evals.evaluate()
        except TimeoutError:
            evals.cancel()
            _log.warning("the evaluation of version %d did not fit into run.drain_timeout_seconds and was cancelled", ledger.version)

    async def _in_time(self, condition: Callable[[LedgerView], bool], otherwise: str) -> bool:
        """Say whether it came true before the drain's time was up; a run that nobody has asked to end fails when not."""
        try:
            async with asyncio.timeout_at(self._drain_deadline):
                await self._watch.until(condition)
        except TimeoutError as error:
            how = f"run.drain_timeout_seconds ({self._run.drain_timeout_seconds:g} s) ran out: {otherwise}"
            if not self._asked_to_drain:
                raise RunFailed(how) from error
            _log.warning("%s; what is on disk is taken up again by --resume", how)
            return False
        return True

    async def _awaited(self, service: Service) -> None:
        try:
            await service()
        except Exception as error:
            self._parts.failing(error)
            raise

    async def _guard(self) -> None:
        """End the run when batch after batch would be empty: a broken environment or reward, not something to wait out."""
        limit = self._most_barren
        await self._watch.until(lambda now: now.barren >= limit)
        raise EmptyBatches(
            f"{limit} groups in a row had nothing to train on (run.max_empty_batches x groups_per_batch): {why_barren(self._watch.now)}"
        )


def _name(service: Service) -> str:
    owner = getattr(service, "__self__", None)
    label = getattr(service, "__name__", repr(service))
    return f"{type(owner).__name__}.{label}" if owner is not None else label
