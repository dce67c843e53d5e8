"""Ends of runs as processes: `python ending_scenes.py SCENE DIRECTORY` plays one, with a run that does nothing and something that hangs.

What it prints is what a person at the terminal would see; the ending goes to `ending.json` as it would to run.json.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec

from headway.cli.streams import leave_within
from headway.errors import HeadwayError, Stalled, StorageError, TrainerFailed
from headway.launch.ending import Ends
from headway.rules.ledger import Ledger
from headway.settings import Config, EnvironmentSection, PromptsSection, RunSection
from headway.sim.journal import SimJournal


def config(**run):
    return Config(
        run=RunSection(**{"shutdown_seconds": 60.0, "drain_timeout_seconds": 1.0, "stall_seconds": 0} | run),
        prompts=PromptsSection(source="a:b"),
        environment=EnvironmentSection(entry="a:b", cleanup_seconds=0.5),
    )


class Orchestrated:
    """As much of an orchestrator as its end sees."""

    def __init__(self, *, drains=True, ending=""):
        self._ending = ending
        self._asked = asyncio.Event()
        self._heard = asyncio.Event()
        self._drains = drains

    @property
    def ledger(self):
        return Ledger(draining=self._ending)

    async def until_draining(self):
        if not self._ending:
            await self._heard.wait()
        return self._ending or self.reason

    def drain(self, reason, code=0):
        self.reason = reason
        self._heard.set()
        if self._drains:
            self._asked.set()

    async def run(self):
        say("runs")
        await self._asked.wait()
        return self.reason


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def for_ever():
    await asyncio.get_running_loop().create_future()


async def deaf():
    """Hang, whatever cancels it."""
    while True:
        try:
            await for_ever()
        except asyncio.CancelledError:
            say("not listening")


class Journal(SimJournal):
    def __init__(self, *, close=None):
        super().__init__()
        self._close = close

    async def close(self):
        say("journal closes")
        if self._close is not None:
            await self._close()


async def done(ends):
    ends.journal = Journal()
    return "all is done"


async def journal_hangs(ends):
    ends.journal = Journal(close=deaf)
    return "all is done"


async def journal_fails(ends):
    async def fail():
        raise StorageError("the disk is gone")

    ends.journal = Journal(close=fail)
    return "all is done"


async def closers_hang(ends):
    ends.journal = Journal()
    ends.closers.add("the engine", for_ever)
    ends.closers.add("the worker", deaf)
    ends.closers.add_blocking("the tracker", lambda: time.sleep(600))
    ends.closers.add("the trainer", quick)
    return "all is done"


async def quick():
    say("closed")


async def closers_fail(ends):
    async def fail():
        raise RuntimeError("cannot be closed")

    def fail_too():
        raise OSError("cannot be written")

    ends.closers.add("the engine", fail)
    ends.closers.add_blocking("the tracker", fail_too)
    ends.closers.add("the trainer", quick)
    return "all is done"


async def closed_together(ends):
    """Each closer waits for all the others: one after the other they would never close."""
    names = ("a", "b", "c")
    together, closing, loop = threading.Event(), [], asyncio.get_running_loop()

    def begin():
        closing.append(1)
        if len(closing) == 2 * len(names):
            together.set()

    async def close():
        begin()
        while not together.is_set():  # noqa: ASYNC110  threads set it
            await asyncio.sleep(0.01)

    def close_blocking():
        loop.call_soon_threadsafe(begin)
        together.wait()

    for name in names:
        ends.closers.add(name, close)
        ends.closers.add_blocking(name, close_blocking)
    return "all is done"


async def thread_hangs(ends):
    threading.Thread(target=time.sleep, args=(600,)).start()
    return "all is done"


async def fails(ends):
    ends.journal = Journal()
    raise TrainerFailed("the trainer is gone")


async def stalls(ends):
    ends.failing(Stalled("nothing moves"))
    await deaf()


async def fails_and_hangs(ends):
    ends.failing(TrainerFailed("the trainer is gone"))
    await deaf()


async def drains(ends):
    orchestrator = Orchestrated()
    ends.runs(orchestrator)
    return await orchestrator.run()


async def ends_anyway(ends):
    ends.runs(Orchestrated(ending="all 3 steps are trained"))
    say("runs")
    while not (ends.path / "asked").exists():  # noqa: ASYNC110  another process makes it
        await asyncio.sleep(0.01)
    return "all 3 steps are trained"


async def drain_hangs(ends):
    orchestrator = Orchestrated(drains=False)
    ends.runs(orchestrator)
    await asyncio.shield(asyncio.ensure_future(deaf_orchestrator(orchestrator)))


async def deaf_orchestrator(orchestrator):
    await orchestrator.run()


async def own_drain_hangs(ends):
    ends.runs(Orchestrated(ending="all 3 steps are trained"))
    await for_ever()


async def stop_hangs(ends):
    orchestrator = Orchestrated(drains=False)
    ends.runs(orchestrator)
    say("runs")
    await deaf()


async def two_signals_at_once(ends):
    ends.runs(Orchestrated(drains=False))
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    await deaf()


async def loop_blocks(ends):
    ends.runs(Orchestrated())
    say("runs")
    hold_the_loop()
    return "never"


def hold_the_loop():
    while True:
        time.sleep(1)


async def starts(ends):
    say("runs")
    await for_ever()


SOON = {"shutdown_seconds": 0.5}  # of scenes in which something hangs, and this limit ends it; the others are never to meet theirs
RUN = {
    "journal_hangs": {"shutdown_seconds": 2.0},
    "closers_hang": {"shutdown_seconds": 4.0},
    "stalls": SOON,
    "fails_and_hangs": SOON,
    "loop_blocks": {"on_stall": "exit", "stall_seconds": 6.0, **SOON},
    "drains": {"drain_timeout_seconds": 60.0},
    "drain_hangs": SOON,
    "own_drain_hangs": SOON,
    "two_signals_at_once": {"drain_timeout_seconds": 600.0, **SOON},
    "stop_hangs": {"drain_timeout_seconds": 60.0},
}


def main(scene, directory, run):
    logging.getLogger("headway").setLevel(logging.INFO)
    path = Path(directory)

    def save(ending):
        say(f"saved {ending.code}")
        (path / "ending.json").write_text(json.dumps(msgspec.to_builtins(ending)))

    ends = Ends(config(**RUN.get(scene, {}) | run), path=path, log=path / "events.log", save=save)
    code = 1
    try:
        code = ends.play(globals()[scene])
    except HeadwayError as error:
        code = error.exit_code
        sys.stderr.write(f"headway: {error}\n")
    finally:
        leave_within(1.0, code)
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
