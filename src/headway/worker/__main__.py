"""`python -m headway.worker --wire FD`: a rollout worker. Started by the orchestrator, over an inherited socket; not by people."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
from collections.abc import Callable

from headway.open_files import allow_many
from headway.secrecy import ConcealingFormatter
from headway.worker.server import serve


def main() -> None:
    """Run the worker."""
    parser = argparse.ArgumentParser(prog="python -m headway.worker", description=__doc__)
    parser.add_argument("--wire", type=int, required=True, help="number of the inherited socket")
    wire = socket.socket(fileno=parser.parse_args().wire)
    wire.set_inheritable(False)
    to_log = logging.StreamHandler()
    to_log.setFormatter(ConcealingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[to_log])
    allow_many()
    with asyncio.Runner(loop_factory=_fast_loop()) as runner:
        runner.run(serve(wire))


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop where it is installed (the `fast` extra), otherwise asyncio's own."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = new_event_loop
    return factory


if __name__ == "__main__":
    main()
