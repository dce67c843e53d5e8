"""Fake engines for tests that do not run on an event loop: as a process of its own, which can be killed, or on a thread, at hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from headway.lifeline import VARIABLE
from headway.testing.engine.script import EngineScript, Rule
from headway.testing.engine.server import FakeEngine
from headway.testing.log import Entry
from headway.testing.process import FakeProcess

T = TypeVar("T")


class EngineProcess(FakeProcess):
    """`python -m headway.testing.engine` under way: `url`, `log_path`, `entries()`; killed and started again at the same address."""

    def __init__(self, directory: Path, *, script: EngineScript | None = None, rules: Sequence[Rule] = (), name: str = "engine") -> None:
        script = script or EngineScript()
        super().__init__(directory / f"{name}.jsonl")
        self.url = ""
        self.port = 0
        self._script = directory / f"{name}.script.json"
        self._script.write_bytes(msgspec.json.encode(msgspec.structs.replace(script, rules=(*rules, *script.rules))))

    def start(self) -> Self:
        """Start the process and wait until it serves. Called again, it ends what still runs, and serves at the same address."""
        self.kill()
        command = [sys.executable, "-m", "headway.testing.engine", "--script", str(self._script), "--log", str(self.log_path)]
        variables = {name: value for name, value in os.environ.items() if name != VARIABLE}
        self.process = subprocess.Popen([*command, "--port", str(self.port)], stdout=subprocess.PIPE, text=True, env=variables)
        assert self.process.stdout is not None  # noqa: S101 -- a pipe was asked for
        line = self.process.stdout.readline()
        if not line.startswith("serving "):
            raise RuntimeError(f"the fake engine did not start: {line!r}")
        self.url = line.split()[-1]
        self.port = int(self.url.rpartition(":")[2])
        return self

    def set_rules(self, rules: Sequence[Rule]) -> None:
        """Replace the rules of the running engine, counts from zero."""
        call = urllib.request.Request(f"{self.url}/_fake/rules", data=msgspec.json.encode(list(rules)))  # noqa: S310 -- loopback
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(call, timeout=10).close()


class EngineThread:
    """A fake engine on a loop in a thread of its own, for tests without one: `engine` is at hand, `call` runs something on its loop."""

    def __init__(self, engine: FakeEngine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self._loop = loop

    @property
    def url(self) -> str:
        """Where it serves."""
        return self.engine.url

    def entries(self) -> list[Entry]:
        """Return what it has logged so far."""
        return list(self.engine.log.entries)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `engine.kill()`, `engine.start()`, `engine.until(...)` or the like on its loop, and return the result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


@contextlib.contextmanager
def engine_thread(rules: Sequence[Rule] = (), **options: Any) -> Iterator[EngineThread]:
    """Serve a fake engine from a thread within the block; `options` are those of `FakeEngine`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fake engine", daemon=True)
    thread.start()

    async def made() -> FakeEngine:
        engine = FakeEngine(rules, **options)
        await engine.start()
        return engine

    try:
        served = EngineThread(asyncio.run_coroutine_threadsafe(made(), loop).result(10), loop)
        try:
            yield served
        finally:
            served.call(served.engine.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def kill_this_process() -> None:
    """End the process as kill -9 does: `dies` of an engine that is a process."""
    os.kill(os.getpid(), signal.SIGKILL)


def print_serving(url: str) -> None:
    """Tell whoever started this process where it serves."""
    sys.stdout.write(f"serving {json.dumps('fake')} at {url}\n")
    sys.stdout.flush()
