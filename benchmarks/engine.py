"""Tokens per second of the embedded engine beside `model.generate` on the same model and shape, in one run; one JSON line.

64 / 128 / 256 sequences of 8 prompt + 64 new tokens, sampled at temperature 1, float32, one torch thread. `engine` is the scheduler in this
process, `http` the same through the server in a process of its own, `generate` is transformers' own loop (the best of `--repeats` each,
taken in turn). `one_token` is the shape of a short turn: 800 requests of one token over HTTP, as requests per second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging as transformers_logging

from headway.embedded.engine.model import load_model
from headway.embedded.engine.request import Request
from headway.embedded.engine.scheduler import Scheduler

PROMPT, NEW = 8, 64
SEQUENCES = (64, 128, 256)
SERVE = (
    "import sys; from pathlib import Path; from headway.embedded.engine import EngineServerSettings, serve; "
    "serve(EngineServerSettings(model=Path(sys.argv[1]), device='cpu', threads=1))"
)


def make_model(directory: Path) -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 57, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    rest = {"head_dim": 32, "intermediate_size": 128, "tie_word_embeddings": False, "initializer_range": 0.06}
    tokens = {"max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    AutoModelForCausalLM.from_config(Qwen3Config(**shape | rest | tokens)).save_pretrained(directory)


def prompts(n: int) -> list[list[int]]:
    return np.random.default_rng(n).integers(3, 57, size=(n, PROMPT)).tolist()


def seconds(action: Callable[[], int]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def run_engine(scheduler: Scheduler, n: int) -> int:
    for key, prompt in enumerate(prompts(n)):
        scheduler.submit(Request(key, prompt, NEW, temperature=1.0, top_p=1.0, top_k=0, seed=key, stop_ids=()))
    ended = 0
    while scheduler.busy:
        ended += sum(len(request.token_ids) for request in scheduler.step())
    return ended


def run_generate(model: Any, n: int) -> int:
    ids = torch.tensor(prompts(n))
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": NEW, "min_new_tokens": NEW}
    with torch.inference_mode():
        return int(model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, eos_token_id=None, **options).numel())


async def over_http(url: str, session: aiohttp.ClientSession, n: int, new: int) -> float:
    async def one(seed: int, prompt: list[int]) -> int:
        sampling = {"max_tokens": new, "seed": seed, "logprobs": 0, "ignore_eos": True}
        body = json.dumps({"token_ids": prompt, "sampling_params": sampling}).encode()
        async with session.post(f"{url}/inference/v1/generate", data=body) as response:
            return len(await response.read())

    start = time.perf_counter()
    await asyncio.gather(*(one(seed, prompt) for seed, prompt in enumerate(prompts(n))))
    return time.perf_counter() - start


async def measure_http(url: str, repeats: int) -> dict[str, float]:
    best: dict[str, float] = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for _ in range(repeats + 1):  # the first warms connections up
            for n in SEQUENCES:
                best[str(n)] = max(best.get(str(n), 0.0), n * NEW / await over_http(url, session, n, NEW))
            best["one_token"] = max(best.get("one_token", 0.0), 800 / await over_http(url, session, 800, 1))
    return best


@contextmanager
def served(directory: Path) -> Iterator[str]:
    with subprocess.Popen([sys.executable, "-c", SERVE, str(directory)], stdout=subprocess.PIPE, text=True) as server:
        try:
            yield next(iter(server.stdout or ())).split()[-1]
        finally:
            server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_model(directory)
        model = AutoModelForCausalLM.from_pretrained(directory).eval()
        slots = load_model(directory, device=torch.device("cpu"), dtype=torch.float32, max_rows=256, max_context_tokens=0)
        scheduler = Scheduler(slots, max_rows=256, label="bench-0")
        engine: dict[int, float] = {}
        generate: dict[int, float] = {}
        for n in SEQUENCES:
            run_engine(scheduler, n)
            for _ in range(repeats):
                engine[n] = max(engine.get(n, 0.0), n * NEW / seconds(partial(run_engine, scheduler, n)))
                generate[n] = max(generate.get(n, 0.0), n * NEW / seconds(partial(run_generate, model, n)))
        with served(directory) as url:
            http = asyncio.run(measure_http(url, repeats))
    rows = {
        str(n): {
            "engine_tokens_per_second": round(engine[n]),
            "generate_tokens_per_second": round(generate[n]),
            "ratio": round(engine[n] / generate[n], 2),
            "http_tokens_per_second": round(http[str(n)]),
        }
        for n in SEQUENCES
    }
    shape = {"prompt_tokens": PROMPT, "new_tokens": NEW, "torch_threads": 1, "torch": torch.__version__}
    print(json.dumps({"benchmark": "engine", **shape, "sequences": rows, "one_token_requests_per_second": round(http["one_token"])}))


if __name__ == "__main__":
    main()
