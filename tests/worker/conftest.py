"""A runtime with a scripted engine: everything of a worker but its process."""

from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import Reply, Script, ScriptedEngine
from small_models import CHATML, write_tokenizer

from headway.adapters.engines.client import EngineClient
from headway.types import AttemptRequest, Failure, Prompt, Rollout, SamplingParams
from headway.worker.inline import InlineWorker
from headway.worker.runtime import Runtime
from headway.worker.tokenizer import ModelTokenizer


def request(url: str, *, fields: dict[str, Any] | None = None, **changes: Any) -> AttemptRequest:
    """Return a request for one attempt."""
    values: dict[str, Any] = {
        "group": 3,
        "member": 1,
        "attempt": 0,
        "prompt": Prompt("p", 0, fields or {}),
        "purpose": "train",
        "engine": url,
        "seed": 17,
        "sampling": SamplingParams(max_tokens=16),
        "max_rollout_tokens": 0,
    }
    return AttemptRequest(**(values | changes))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer directory with a ChatML template."""
    return write_tokenizer(tmp_path_factory.mktemp("model"), chat_template=CHATML)


class Bench:
    """An inline worker, and the engine behind it."""

    def __init__(self, engine: ScriptedEngine, worker: InlineWorker) -> None:
        self.engine = engine
        self.worker = worker

    async def attempt(self, **changes: Any) -> Rollout | Failure:
        return await self.worker.attempt(request(self.engine.url, **changes))


@pytest.fixture
def bench(model: Path) -> Callable[..., Any]:
    """Return a context that runs `environment` (and `scorer`) against `script`."""

    @asynccontextmanager
    async def open_bench(
        environment: Any, script: Script | Reply, *, scorer: Any = None, directory: Path = model, cleanup_seconds: float = 5.0
    ):
        runtime = Runtime(
            environment=environment,
            scorer=scorer,
            name="test",
            tokenizer=ModelTokenizer.load(directory),
            client=EngineClient("abc", retries=1),
            truncated_reward=-0.25,
        )
        async with ScriptedEngine(script, label="abc-3") as engine:
            worker = InlineWorker(runtime, cleanup_seconds=cleanup_seconds)
            yield Bench(engine, worker)
            await worker.close()

    return open_bench
