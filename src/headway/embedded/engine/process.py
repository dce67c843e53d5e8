"""An engine as a process: binds its port, waits for its model, serves, and ends on a signal, with its parent, or with its model.

The port is bound before the model is loaded, so that a port in use is known at once; it listens only when requests can be served.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import torch
from aiohttp import web

from headway.embedded.engine.model import load_model
from headway.embedded.engine.scheduler import Scheduler
from headway.embedded.engine.server import EngineApi
from headway.embedded.engine.settings import EngineServerSettings
from headway.embedded.engine.thread import ModelThread
from headway.embedded.threads import configure_torch
from headway.errors import ConfigError
from headway.lifeline import Lifeline
from headway.loopback import is_loopback
from headway.open_files import allow_many

POLL_SECONDS = 0.02
JOIN_SECONDS = 5.0
KEY_VARIABLE = "HEADWAY_ENGINE_KEY"  # who does not show what it holds is refused
BACKLOG = 4096  # a batch's worth of connections may arrive at once


def run(settings: EngineServerSettings) -> None:
    """Serve until told to stop; see headway.embedded.engine.serve."""
    allow_many()
    asyncio.run(_serve(settings, Lifeline.from_environment()))


async def _serve(settings: EngineServerSettings, lifeline: Lifeline | None) -> None:
    loop = asyncio.get_running_loop()
    serving = loop.create_task(_serve_model(settings, lifeline), name="serve")
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.cancel)

    def parent_lost() -> None:
        loop.call_soon_threadsafe(serving.cancel)

    if lifeline is not None:
        lifeline.watch(parent_lost)
    with suppress(asyncio.CancelledError):
        await serving


async def _serve_model(settings: EngineServerSettings, lifeline: Lifeline | None) -> None:
    async with running(settings) as (url, thread):
        if lifeline is not None:
            lifeline.ready(url=url)
        else:
            sys.stdout.write(f"serving {settings.model} at {url}\n")
            sys.stdout.flush()
        error = await thread.died
        # A crash and nothing stated on purpose: whoever supervises this process may try again.
        raise RuntimeError(f"the engine's model thread died: {error!r}") from error


@asynccontextmanager
async def running(settings: EngineServerSettings) -> AsyncIterator[tuple[str, ModelThread]]:
    """Serve within the block; yields the base URL and the thread that runs the model."""
    with bind(settings.host, settings.port) as listener:
        if not is_loopback(settings.host) and not os.environ.get(KEY_VARIABLE):
            what = f"anyone who reaches {settings.host} may generate here and change the weights"
            sys.stderr.write(f"warning: {what}: set {KEY_VARIABLE}, or listen on 127.0.0.1\n")
        await _model_complete(settings.model, settings.await_model_seconds)
        thread = ModelThread(lambda: build_scheduler(settings))
        try:
            scheduler = await thread.ready
            api = EngineApi(thread, scheduler, name=settings.model.resolve().name, key=os.environ.get(KEY_VARIABLE, ""))
            runner = web.ServerRunner(api.server(), shutdown_timeout=1.0)
            await runner.setup()
            try:
                await web.SockSite(runner, listener, backlog=BACKLOG).start()
                host, port = listener.getsockname()[:2]
                yield f"http://{f'[{host}]' if ':' in host else host}:{port}", thread
            finally:
                await runner.cleanup()
        finally:
            thread.close(join_seconds=JOIN_SECONDS)


def build_scheduler(settings: EngineServerSettings) -> Scheduler:
    """Load the model that the settings name. Runs on the thread that will run the model: torch counts its threads per caller."""
    model = load_model(
        settings.model,
        device=configure_torch(settings.threads, settings.device),
        dtype=getattr(torch, settings.dtype),
        max_rows=settings.max_sequences,
        max_context_tokens=settings.max_context_tokens,
    )
    return Scheduler(model, max_rows=settings.max_sequences, label=settings.label)


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket; ConfigError for a port in use or a host that is not this machine's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use: choose another one, or 0 for a free one") from error
        raise ConfigError(f"the engine cannot listen on {host}:{port} ({error.strerror or error})") from error
    return listener


async def _model_complete(directory: Path, seconds: float) -> None:
    """Return once the directory holds a whole checkpoint; ConfigError when it does not within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            while not _is_complete(directory):  # noqa: ASYNC110  (another process writes the directory)
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError as error:
        what = "config.json, *.safetensors" + (" and manifest.json" if _is_version(directory) else "")
        raise ConfigError(f"{directory} is no complete checkpoint (it needs {what}): check the path of the model") from error


def _is_complete(directory: Path) -> bool:
    whole = (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))
    return whole and (not _is_version(directory) or (directory / "manifest.json").is_file())


def _is_version(directory: Path) -> bool:
    """Whether this is a run's `weights/<8 digits>`, which a manifest completes."""
    return len(directory.name) == 8 and directory.name.isdigit()
