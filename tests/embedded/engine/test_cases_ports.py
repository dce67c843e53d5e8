"""Fault case L08 of embedded engines: many that start at once on one machine."""

import asyncio
from contextlib import AsyncExitStack

import pytest

pytest.importorskip("torch")

from headway.adapters.engines.vllm.admin import VllmEngine
from headway.embedded.engine.process import running
from headway.embedded.engine.settings import EngineServerSettings
from headway.settings import EngineSection

pytestmark = pytest.mark.torch


async def test_L08_twenty_engines_start_at_once_and_each_tells_the_port_that_is_its_own(make_checkpoint):
    model = make_checkpoint("qwen3", 0)
    chosen = [EngineServerSettings(model=model, label=f"engine-{number}", threads=1) for number in range(20)]
    async with AsyncExitStack() as stack:
        served = await asyncio.gather(*(stack.enter_async_context(running(settings)) for settings in chosen))
        engines = [VllmEngine(f"{number}", url, EngineSection()) for number, (url, _) in enumerate(served)]
        assert [await engine.label() for engine in engines] == [f"engine-{number}" for number in range(20)]
        await asyncio.gather(*(engine.close() for engine in engines))
