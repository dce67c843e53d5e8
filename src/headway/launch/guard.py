"""Stands between the orchestrator and a server that knows nothing of headway: says when it serves, and ends it when it has to end.

    python -m headway.launch.guard --url URL --warm-up PATH --body JSON --grace SECONDS -- COMMAND...

The server is this process's child, in its group. It is ready once `/health` answers 200 and one generation has been answered: the first
may take half a minute. SIGTERM here, or the end of the orchestrator, however it ends, is SIGTERM to the server, and SIGKILL to it and to
all that it has started once the grace is over. This process ends as the server did. Its standard output is the server's.

`--heed-health`: a server that serves and then answers 503 to `/health`, several times in a row, is ended: a vLLM whose engine has died may
stay for twenty minutes, refusing everything. Not for SGLang, which also answers so while it is paused.
"""

from __future__ import annotations

import argparse
import ctypes
import http.client
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from headway.lifeline import Lifeline, adopt_orphans, descendants, kill_found

KEY_VARIABLE = "HEADWAY_ENGINE_KEY"
_LOOK_SECONDS = 0.25
_HEALTH_SECONDS = 30.0  # SGLang generates a token to answer
_HEED_SECONDS, _HEEDED_LOOKS = 2.0, 3
_WARM_UP_SECONDS = 600.0  # whoever waits for this server has a limit of its own
_BEYOND_GRACE_SECONDS = 5.0
_SHOWN = 200  # characters of an answer
_READ = 64 * 1024  # bytes of an answer: whoever listens there may be anybody
_PR_SET_PDEATHSIG = 1


class Server:
    """The server's process. `orphaned`: whoever wanted it is gone."""

    def __init__(self, command: Sequence[str], *, grace_seconds: float) -> None:
        self.orphaned = False
        self._grace_seconds = grace_seconds
        self._gone = threading.Event()
        self._process = subprocess.Popen(command, preexec_fn=_die_with_this_process)  # noqa: PLW1509 -- there is no other thread yet

    def reap(self) -> int:
        """Wait for its end, and for that of all orphans that come here meanwhile; return its exit code, -n where signal n ended it."""
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == self._process.pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)  # the Popen object is to know that nothing is left to wait for
                self._gone.set()
                return self._process.returncode

    def end(self) -> None:
        """SIGTERM, and SIGKILL to all that is left after the grace. From any thread."""
        self._signal(signal.SIGTERM)
        if not self._gone.wait(self._grace_seconds):
            kill_descendants()
            self._signal(signal.SIGKILL)

    def lost(self) -> None:
        """End it: nobody wants it any more."""
        self.orphaned = True
        self.end()

    def _signal(self, number: signal.Signals) -> None:
        if not self._gone.is_set():
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)


def kill_descendants() -> None:
    """Send SIGKILL to all that this process has started, directly or not (Linux)."""
    kill_found(lambda: descendants(os.getpid()))


def await_service(url: str, *, warm_up: str, body: str, key: str) -> None:
    """Return once the server answers, and has answered one generation, whatever that says. Waits for ever."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    while True:
        try:
            if ask(url, "GET", "/health", headers, timeout_seconds=_HEALTH_SECONDS)[0] == http.client.OK:
                began = time.monotonic()
                status, answer = ask(url, "POST", warm_up, headers, body, timeout_seconds=_WARM_UP_SECONDS)
                said = "" if status == http.client.OK else f": {answer[:_SHOWN].decode(errors='replace')}"
                print(f"warm-up: {warm_up} answered {status} after {time.monotonic() - began:.1f} s{said}", flush=True)  # noqa: T201 -- its log
                return
        except (OSError, http.client.HTTPException):
            pass  # it is not up yet; when it never will be, its process ends, or somebody's patience
        time.sleep(_LOOK_SECONDS)


def until_dead(url: str) -> None:
    """Return once the server has said several times in a row that it is dead. One that says nothing is busy, or ends."""
    looks = 0
    while looks < _HEEDED_LOOKS:
        time.sleep(_HEED_SECONDS)
        try:
            status, _ = ask(url, "GET", "/health", {}, timeout_seconds=_HEALTH_SECONDS)
        except (OSError, http.client.HTTPException):
            continue
        looks = looks + 1 if status == http.client.SERVICE_UNAVAILABLE else 0
    print(f"/health has answered 503 {_HEEDED_LOOKS} times in a row: the server is ended", flush=True)  # noqa: T201 -- its log


def ask(url: str, method: str, path: str, headers: dict[str, str], body: str = "", *, timeout_seconds: float) -> tuple[int, bytes]:
    """Send one request, past all proxies; return status and body. Raises OSError, HTTPException."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_seconds)
    try:
        connection.request(method, path, body or None, headers)
        response = connection.getresponse()
        return response.status, response.read(_READ)
    finally:
        connection.close()


def main() -> int:
    """Start the server and stay until it has ended."""
    parser = argparse.ArgumentParser(prog="python -m headway.launch.guard")
    for name in ("url", "warm-up", "body"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--grace", type=float, default=8.0)
    parser.add_argument("--heed-health", action="store_true")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    line = Lifeline.from_environment()
    adopt_orphans()  # what the server leaves behind comes here, and is found
    terminated = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: terminated.set())
    try:
        server = Server(options.command, grace_seconds=options.grace)
    except OSError as error:
        print(f"headway: {options.command[0]} cannot be started: {error.strerror}", flush=True)  # noqa: T201 -- its log
        return 2

    def heed() -> None:
        terminated.wait()
        server.end()

    def announce() -> None:
        await_service(options.url, warm_up=options.warm_up, body=options.body, key=os.environ.get(KEY_VARIABLE, ""))
        if line is not None:
            line.ready(url=options.url)
        if options.heed_health:
            until_dead(options.url)
            server.end()

    if line is not None:
        line.watch(server.lost, grace_seconds=options.grace + _BEYOND_GRACE_SECONDS)
    for work in (heed, announce):
        threading.Thread(target=work, name=work.__name__, daemon=True).start()
    code = server.reap()
    kill_descendants()
    if server.orphaned and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # the last of them is this process
    return code


def end_like(code: int) -> None:
    """End this process as another has ended: with its exit code, or by the signal that ended it."""
    if code >= 0:
        os._exit(code)  # not past threads that still ask
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core dump is enough
    with suppress(OSError):  # SIGKILL has no handler
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def _die_with_this_process() -> None:
    """In the server, before it begins: a guard that is killed takes it along (Linux)."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before any fork


if __name__ == "__main__":
    end_like(main())
