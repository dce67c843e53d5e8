"""LoRA adapters at a real vLLM: each version under a name of its own, each answer written by one of them whole."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
from pushing import WRONG_DIFFERENCE, assert_right, differences, fleet, prompts
from real_server import PROCESSED, RealServer, serving
from tiny_models import write_adapter, write_merged

from headway.types import Checkpoint

REQUESTS = 16
MAX_TOKENS = 160
ARGUMENTS = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "3", "--max-cpu-loras", "4")


async def test_answers_are_of_the_adapter_that_they_are_stamped_with(python: Path, versions: list[Checkpoint], tmp_path: Path) -> None:
    for directory in ("adapters", "merged"):
        (tmp_path / directory).mkdir()
    adapters = [write_adapter(tmp_path / "adapters", version, versions[0]) for version in (1, 2, 3)]
    merged = [write_merged(tmp_path / "merged", version, versions[0]) for version in range(4)]
    with serving(RealServer(python, Path(versions[0].directory), tmp_path / "log", (*PROCESSED, *ARGUMENTS))) as server:
        async with fleet(server.url, weight_transfer="lora") as it:
            await it.push(adapters[0])
            asked = prompts(REQUESTS, 48)
            generations = await it.across(asked, lambda: it.push(adapters[1]), max_tokens=MAX_TOKENS, sampled=REQUESTS * 40)
            written = list(zip(asked, generations, strict=True))
            after = await it.generate(asked[0], max_tokens=MAX_TOKENS)
            await it.push(adapters[2])
            status, models = await asyncio.to_thread(server.call, "GET", "/v1/models")
    assert [generated.spans for _, generated in written] == [[(0, 1)]] * REQUESTS  # an adapter that comes changes nothing in flight
    assert after.spans == [(0, 2)]
    assert_right(np.concatenate([differences(prompt, generated, merged) for prompt, generated in [*written, (asked[0], after)]]))
    assert min(differences(prompt, generated, merged, lambda _: 0).mean() for prompt, generated in written) > WRONG_DIFFERENCE
    assert status == 200
    assert {model["id"] for model in models["data"]} == {"tiny", adapters[1].label, adapters[2].label}
