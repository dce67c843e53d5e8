"""A real vLLM, as a process of its own: started, waited for, killed and started again at the same address.

Its command is the one that headway's users are told of; HEADWAY_VLLM_PYTHON names the Python of the environment that holds it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from headway.lifeline import VARIABLE

START_SECONDS = 300.0  # it imports for one to two minutes on a loaded machine
WARM_UP_SECONDS = 120.0
END_SECONDS = 60.0

ARGUMENTS = (
    *("--host", "127.0.0.1", "--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-seqs", "64", "--enforce-eager"),
    *("--enable-scale-out", "--served-model-name", "tiny"),
    "--no-enable-chunked-prefill",  # a request with a seed whose prefill is split kills vLLM 0.32.0 on CPUs (torch: no generator offset)
)
PROCESSED = ("--logprobs-mode", "processed_logprobs")
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause, reload and label
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class RealServer:
    """One vLLM server with `model`, at a port of its own that it keeps across restarts."""

    def __init__(self, python: Path, model: Path, log: Path, arguments: Sequence[str] = PROCESSED) -> None:
        self.log = log
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start_seconds: list[float] = []
        module = ["-m", "vllm.entrypoints.openai.api_server"]  # the `vllm` command looks for metadata that the CPU wheel names otherwise
        self._command = [str(python), *module, "--model", str(model), "--port", str(self.port), *ARGUMENTS, *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._family: list[psutil.Process] = []

    def start(self) -> None:
        """Start it without waiting."""
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | ENVIRONMENT
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        self._started = time.monotonic()

    def until_ready(self) -> None:
        """Wait until it serves, and has answered its first request, which is slow."""
        deadline = self._started + START_SECONDS
        while not self.healthy():
            assert self._process is not None
            assert self._process.poll() is None, f"vLLM ended with {self._process.returncode}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"vLLM does not serve after {START_SECONDS:g} s:\n{self.tail()}"
            time.sleep(0.25)
        self.generate([1, 3, 4], limit=WARM_UP_SECONDS)
        self.start_seconds.append(round(time.monotonic() - self._started, 1))
        self._family = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]

    def healthy(self) -> bool:
        """Whether GET /health answers 200."""
        try:
            return self.call("GET", "/health", limit=10.0)[0] == 200
        except OSError:
            return False

    def kill(self) -> None:
        """End it as a crash does: all its processes, at once, without a word."""
        for process in self._living():
            process.kill()
        assert self._process is not None
        self._process.wait()
        psutil.wait_procs(self._family, END_SECONDS)

    def stop(self) -> list[str]:
        """End it with SIGTERM; returns the command lines of what is left of it after that, and ends those too."""
        if self._process is None:
            return []
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # one that never was ready has a family that nobody has counted
            self._process.wait()
        _, left = psutil.wait_procs(self._family, 10.0)
        told = [" ".join(process.cmdline()) for process in left]
        for process in left:
            process.kill()
        return told

    def _living(self) -> list[psutil.Process]:
        return [process for process in self._family if process.is_running()]

    def call(self, method: str, path: str, body: Any = None, *, limit: float = 120.0) -> tuple[int, Any]:
        """Call the server directly, headway's own code left out: status and JSON (or text)."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method, headers={"Content-Type": "application/json"})
        try:
            with _opener.open(request, timeout=limit) as answer:
                status, raw = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read()
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw.decode("utf-8", "replace")

    def generate(self, prompt: Sequence[int], *, max_tokens: int = 8, seed: int = 0, limit: float = 120.0) -> dict[str, Any]:
        """Let it continue a prompt; its one choice."""
        sampling = {"max_tokens": max_tokens, "temperature": 1.0, "seed": seed, "logprobs": 0}
        body = {"request_id": os.urandom(8).hex(), "token_ids": list(prompt), "sampling_params": sampling, "stream": False}
        status, answer = self.call("POST", "/inference/v1/generate", body, limit=limit)
        assert status == 200, answer
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    def label(self) -> str:
        """The version label that it says it serves."""
        answer: dict[str, str] = self.call("GET", "/weight_info")[1]
        return answer["weight_version"]

    def paused(self) -> bool:
        """Whether it is paused."""
        answer: dict[str, bool] = self.call("GET", "/is_paused")[1]
        return answer["is_paused"]

    def cached_tokens(self) -> int:
        """How many prompt tokens it has taken from its prefix cache."""
        status, text = self.call("GET", "/metrics")
        assert status == 200
        return sum(round(float(line.rpartition(" ")[2])) for line in text.splitlines() if line.startswith("vllm:prefix_cache_hits_total{"))

    def tail(self, lines: int = 40) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-lines:])


@contextlib.contextmanager
def serving(server: RealServer) -> Iterator[RealServer]:
    """Have a server up within the block; after it, nothing of it is left."""
    server.start()
    try:
        server.until_ready()
        yield server
    finally:
        left = server.stop()
    assert not left, f"SIGTERM left processes of vLLM behind: {left}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
