"""`python -m headway.testing.trainer RUN`: a fake trainer as a process, so that it can be killed."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path

from headway.errors import HeadwayError
from headway.lifeline import Lifeline
from headway.testing.log import FakeLog
from headway.testing.trainer.loop import TrainerLoop
from headway.testing.trainer.script import TrainerScript, load_script


def main() -> int:
    """Train the run named on the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m headway.testing.trainer", description=__doc__)
    parser.add_argument("run", type=Path, help="the run directory; it is waited for")
    parser.add_argument("--script", type=Path, help="JSON of headway.testing.TrainerScript; unset: an honest trainer")
    parser.add_argument("--log", type=Path, help="JSON lines of what it does, appended to")
    options = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    lifeline = Lifeline.from_environment()
    if lifeline is not None:
        lifeline.watch(stop.set)
    script = load_script(options.script) if options.script else TrainerScript()
    log = FakeLog(options.log)
    try:
        TrainerLoop(options.run, script, log, dies=lambda: os.kill(os.getpid(), signal.SIGKILL)).run(stop)
    except HeadwayError as error:
        sys.stderr.write(f"headway: {error}\n")
        return error.exit_code
    finally:
        log.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
