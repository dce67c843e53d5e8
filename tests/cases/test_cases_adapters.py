"""E10: LoRA adapters that change under load: nothing is reloaded under a name that is in use, and stamps are of what wrote the tokens."""

import asyncio
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headway.adapters.engines import admin_of
from headway.adapters.engines.client import EngineClient
from headway.settings import EngineSection
from headway.testing import EngineScript, FakeEngine, Reply
from headway.types import Checkpoint, EngineAddress, SamplingParams

UPDATES, MODULE = 6, "base_model.model.model.layers.0.self_attn.q_proj"


def adapter(directory, version):
    path = directory / f"adapter-{version}"
    path.mkdir()
    (path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    save_file(
        {f"{MODULE}.lora_A.weight": np.zeros((2, 6), np.float32), f"{MODULE}.lora_B.weight": np.zeros((4, 2), np.float32)},
        path / "adapter_model.safetensors",
    )
    return Checkpoint(version, f"abc-{version}", str(path))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_E10_six_adapters_under_load_have_a_name_each_and_every_token_is_stamped_with_the_one_that_wrote_it(tmp_path, kind):
    """Each name is loaded once and never again: nothing cached under it can be of another version."""
    async with FakeEngine(script=EngineScript(speaks=kind, default=Reply(tokens=8, token_seconds=0.005))) as server:
        engine = EngineAddress(server.url, kind)
        admin = admin_of("engine-0", engine, EngineSection(weight_transfer="lora"))
        client, stamps, over = EngineClient("abc"), {}, asyncio.Event()

        async def generate(member):
            group = 0
            while not over.is_set():
                name = f"train-{group}-{member}-0-1"
                made = await client.generate(engine, [5, 6, 7, 8], SamplingParams(), seed=group, max_tokens=8, request_id=name, lora=True)
                stamps[group, member] = [
                    [version, start, end]
                    for (start, version), end in zip(made.spans, [*(at for at, _ in made.spans[1:]), len(made.token_ids)], strict=True)
                ]
                group += 1

        async def update():
            for version in range(1, UPDATES + 1):
                weights = adapter(tmp_path, version)
                await admin.prepare(weights)
                await admin.transfer(weights)
                await admin.commit(weights)
                await server.until(
                    partial(lambda name: any(entry["adapter"] == name for entry in server.log.of("finished")), weights.label), limit=120
                )
            over.set()

        async with asyncio.TaskGroup() as tasks:
            for member in range(8):
                tasks.create_task(generate(member))
            tasks.create_task(update())
        await admin.close()
        await client.close()
        log = server.log
    assert [entry["name"] for entry in log.of("adapter")] == [f"abc-{version}" for version in range(1, UPDATES + 1)]
    assert [Path(entry["directory"]).name for entry in log.of("adapter")] == [f"adapter-{version}" for version in range(1, UPDATES + 1)]
    finished, used = {entry["id"]: entry for entry in log.of("finished")}, set()
    for entry in log.of("arrived"):
        answer = finished[entry["id"]]
        if answer["status"] == 200:
            used.add(entry["adapter"])
            version = int(entry["adapter"].removeprefix("abc-") or 0)
            assert stamps[entry["group"], entry["member"]] == [[version, 0, len(answer["ids"])]]
    assert used >= {f"abc-{version}" for version in range(1, UPDATES + 1)}
