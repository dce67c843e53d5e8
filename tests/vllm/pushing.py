"""What the tests here do with a server, by headway's own adapters: push a version, let generations run, hold their tokens to account."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tiny_models import LINEAGE, logprobs_under

from headway.adapters.engines import admin_of
from headway.adapters.engines.client import EngineClient
from headway.adapters.engines.generation import Generated
from headway.protocols import Engine
from headway.settings import EngineSection
from headway.types import Checkpoint, EngineAddress, SamplingParams

MEAN_DIFFERENCE = 0.03  # bfloat16 in the engine, float32 here
MOST_DIFFERENCE = 0.15
WRONG_DIFFERENCE = 0.3  # mean, of a version that did not write the tokens: .95 is usual

Differences = npt.NDArray[np.float32]

TRIES = 5


class Fleet:
    """One server, administered and asked by headway's own adapters."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.address = EngineAddress(url)
        self.engine: Engine = admin_of("engine-0", self.address, EngineSection(urls=(url,), **settings))
        self._client = EngineClient(LINEAGE)
        self._lora = settings.get("weight_transfer") == "lora"

    async def push(self, checkpoint: Checkpoint) -> None:
        """Bring new weights to the server, as the orchestrator does."""
        await self.engine.prepare(checkpoint)
        await self.engine.transfer(checkpoint)
        await self.engine.commit(checkpoint)

    async def generate(self, prompt: list[int], *, max_tokens: int, seed: int = 0, temperature: float = 1.0) -> Generated:
        """Let the server continue a prompt, as a worker does."""
        sampling = SamplingParams(temperature=temperature)
        return await self._client.generate(
            self.address, prompt, sampling, seed=seed, max_tokens=max_tokens, request_id=f"r{seed}", lora=self._lora
        )

    async def sampled_tokens(self) -> int:
        """The server's own count."""
        count = await self.engine.sampled_tokens()
        assert count is not None
        return count

    async def until_sampled(self, more: int, since: int) -> None:
        """Wait until the server has written `more` tokens: nothing tells a client before its answer is whole."""
        async with asyncio.timeout(120):
            while await self.sampled_tokens() < since + more:  # noqa: ASYNC110 -- another process counts them
                await asyncio.sleep(0.02)

    async def across(
        self, asked: Sequence[list[int]], change: Callable[[], Awaitable[None]], *, max_tokens: int, sampled: int
    ) -> list[Generated]:
        """Let the server continue the prompts, and change its weights when it has written `sampled` tokens: all are in flight then.

        On a machine that stands still one may be over before the others are seen: then all begin anew.
        """
        for _ in range(TRIES):
            since = await self.sampled_tokens()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.generate(prompt, max_tokens=max_tokens, seed=seed)) for seed, prompt in enumerate(asked)]
                await self.until_sampled(sampled, since)
                in_flight = not any(task.done() for task in tasks)
                if in_flight:
                    await change()
            if in_flight:
                return [task.result() for task in tasks]
        raise AssertionError(f"a generation of {max_tokens} tokens was over before {len(asked)} were seen in flight, {TRIES} times")

    async def close(self) -> None:
        """Close connections."""
        await self._client.close()
        await self.engine.close()


@contextlib.asynccontextmanager
async def fleet(url: str, **settings: Any) -> AsyncIterator[Fleet]:
    """A `Fleet` for the block; `settings` are keys of [engine]."""
    made = Fleet(url, **settings)
    try:
        yield made
    finally:
        await made.close()


def prompts(count: int, length: int) -> list[list[int]]:
    """Return distinct prompts of `length` ids, the same each time."""
    chance = random.Random(5)
    return [[1, *(chance.randrange(3, 57) for _ in range(length - 1))] for _ in range(count)]


def spans_of(generated: Generated) -> list[tuple[int, int, int]]:
    """Return (start, end, version) of each span."""
    starts = [start for start, _ in generated.spans]
    ends = [*starts[1:], len(generated.token_ids)]
    return [(start, end, version) for (start, version), end in zip(generated.spans, ends, strict=True)]


def differences(
    prompt: list[int], generated: Generated, versions: Sequence[Checkpoint], which: Callable[[int], int] = lambda version: version
) -> Differences:
    """How far the engine's log-probability of each token is from that of the version that its span names (or `which` of it)."""
    found = np.zeros(len(generated.token_ids), np.float32)
    for start, end, version in spans_of(generated):
        expected = logprobs_under(versions[which(version)], prompt, generated.token_ids[:end])
        found[start:end] = np.abs(expected[start:end] - np.array(generated.logprobs[start:end], np.float32))
    return found


def assert_right(found: Differences) -> None:
    """The tokens were written by the versions that they are stamped with."""
    assert found.mean() < MEAN_DIFFERENCE, found.mean()
    assert found.max() < MOST_DIFFERENCE, (found.max(), int(found.argmax()))
