"""The engine as a child process: readiness, signals, and the end of its parent."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.e2e]

PROGRAM = """
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from headway.embedded.engine import EngineServerSettings, serve
from headway.errors import HeadwayError
try:
    serve(EngineServerSettings(model=Path(sys.argv[1]), label="ab12cd-0", device="cpu", await_model_seconds=240))
except HeadwayError as error:
    sys.stderr.write(f"{error}\\n")
    sys.exit(error.exit_code)
"""


@asynccontextmanager
async def child(model: Path, *, by: Sequence[str] = ()) -> AsyncIterator[tuple[asyncio.subprocess.Process, socket.socket]]:
    """A started engine and our end of its lifeline; whatever happens, it is gone afterwards."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = (*by, sys.executable, "-c", PROGRAM, str(model))
            process = await asyncio.create_subprocess_exec(
                *command, pass_fds=[theirs.fileno()], env=os.environ | {"HEADWAY_LIFELINE": str(theirs.fileno())}
            )
        ours.setblocking(False)
        try:
            async with asyncio.timeout(240):
                yield process, ours
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_a_child_waits_for_its_manifest_says_where_it_serves_and_ends_on_sigterm(tiny_qwen3: Path, tmp_path: Path):
    model = tmp_path / "00000000"
    shutil.copytree(tiny_qwen3, model)
    async with child(model) as (process, lifeline):
        ready = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(lifeline, 4096))
        (model / "manifest.json").write_text("{}")
        url = json.loads(await ready)["url"]
        async with aiohttp.ClientSession() as session, session.get(f"{url}/weight_info") as response:
            assert await response.json() == {"weight_version": "ab12cd-0"}
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_a_child_that_waits_for_its_model_ends_with_its_parent(tmp_path: Path):
    async with child(tmp_path / "00000000") as (process, lifeline):
        lifeline.close()
        assert await process.wait() in {0, 70}


async def test_more_connections_than_a_shell_allows_files_are_answered(tiny_qwen3: Path):
    async with child(tiny_qwen3, by=("sh", "-c", 'ulimit -Sn 64 && exec "$@"', "sh")) as (_, ours):
        told = json.loads(await asyncio.get_running_loop().sock_recv(ours, 4096))
        host, _, port = told["url"].removeprefix("http://").partition(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(100)]
        async with aiohttp.ClientSession() as session, session.get(f"{told['url']}/health") as answer:
            assert answer.status == 200
        for _, writer in idle:
            writer.close()
