"""`python -m headway.testing.engine`: a fake engine as a process, so that it can be killed."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from pathlib import Path

from headway.lifeline import Lifeline
from headway.testing.engine.process import kill_this_process, print_serving
from headway.testing.engine.script import EngineScript, load_script
from headway.testing.engine.server import FakeEngine


async def serve(script: EngineScript, *, host: str, port: int, log: Path | None) -> None:
    """Serve until a signal, or the end of the parent, says so."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    lifeline = Lifeline.from_environment()

    def lost() -> None:
        loop.call_soon_threadsafe(ended.set)

    if lifeline is not None:
        lifeline.watch(lost)
    async with FakeEngine(script=script, host=host, port=port, log=log, dies=kill_this_process) as engine:
        if lifeline is not None:
            lifeline.ready(url=engine.url)
        print_serving(engine.url)
        await ended.wait()


def main() -> None:
    """Read the options and serve."""
    parser = argparse.ArgumentParser(prog="python -m headway.testing.engine", description=__doc__)
    parser.add_argument("--script", type=Path, help="JSON of headway.testing.EngineScript; unset: an honest engine")
    parser.add_argument("--log", type=Path, help="JSON lines of what happens, appended to")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    script = load_script(options.script) if options.script else EngineScript()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(script, host=options.host, port=options.port, log=options.log))


if __name__ == "__main__":
    main()
