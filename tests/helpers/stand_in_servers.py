"""Stand-ins for vLLM and SGLang: packages of these names whose servers parse the flags that a launch gives, and serve a fake engine.

`write_stand_ins` puts them in a directory that goes on the PYTHONPATH of a launched server. They note how they were started in
`STAND_IN_LOG/started.jsonl`, and do as `STAND_IN_ACT` says: `die` (at the start, with a traceback), `never` (be ready), `stubborn`
(SIGTERM is ignored). Each starts a grandchild in a session of its own, as servers with workers do.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

MARK = "STAND_IN_MARK"
LIMIT_SECONDS = 120.0

SERVER = """
import argparse, asyncio, importlib, json, os, signal, subprocess, sys, time
from pathlib import Path

def parse(kind):
    parser = argparse.ArgumentParser(prog="api_server.py")
    flags = {"vllm": ["model", "served-model-name", "host", "dtype", "max-num-seqs", "max-model-len", "logprobs-mode", "seed", "max-loras"],
             "sglang": ["model-path", "served-model-name", "host", "dtype", "max-running-requests", "context-length", "api-key"]}
    for name in flags[kind]:
        parser.add_argument("--" + name)
    parser.add_argument("--port", type=int)
    parser.add_argument("--middleware", action="append", default=[])
    for name in {"vllm": ["enable-scale-out", "enable-lora"], "sglang": ["enable-metrics"]}[kind]:
        parser.add_argument("--" + name, action="store_true")
    return parser.parse_args()

def main(kind):
    options = parse(kind)
    log = Path(os.environ["STAND_IN_LOG"])
    command = Path("/proc/self/cmdline")
    noted = {**vars(options), "pid": os.getpid(), "argv": sys.argv[1:], "environment": dict(os.environ),
             "command": command.read_bytes().decode().split("\\0") if command.exists() else []}
    with (log / "started.jsonl").open("ab", buffering=0) as file:
        file.write(json.dumps(noted).encode() + b"\\n")  # in one piece: others write there, too
    for name in options.middleware:
        getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2])
    act = os.environ.get("STAND_IN_ACT", "")
    print("loading weights of", options.model if kind == "vllm" else options.model_path, flush=True)
    if act == "die":
        raise ValueError("no kernel for head_dim 16")
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    if act == "never":
        time.sleep(600)
    if act == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from headway.testing import FakeEngine
    from headway.testing.engine.process import kill_this_process

    async def serve():
        async with FakeEngine(host=options.host, port=options.port, log=log / f"engine-{options.port}.jsonl", dies=kill_this_process):
            await asyncio.Event().wait()

    asyncio.run(serve())
"""
_MODULES = {"vllm": "vllm/entrypoints/openai/api_server.py", "sglang": "sglang/launch_server.py"}


def write_stand_ins(directory: Path) -> Path:
    """Write the packages; return the directory for PYTHONPATH."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "stand_in.py").write_text(SERVER)
    for kind, name in _MODULES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'import stand_in\nif __name__ == "__main__":\n    stand_in.main("{kind}")\n')
        for package in path.relative_to(directory).parents[:-1]:
            (directory / package / "__init__.py").touch()
    return directory


def started(log: Path) -> list[dict[str, Any]]:
    """Return how servers were started, in order: their options, `argv`, `command`, `environment`, `pid`."""
    file = log / "started.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []  # the last one may be being written
    return [json.loads(line) for line in lines]


def living(mark: str) -> list[psutil.Process]:
    """Return what lives of a run whose environment carried this mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process.pid != os.getpid()]


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for something that other processes bring about: they raise no event here."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {LIMIT_SECONDS:g} s: {what}"
        time.sleep(0.02)
    return found
