"""What an administrative call that was refused says: what to look at where a path is not there, or a key is missing."""

import pytest

from headway.adapters.engines.sglang.admin import SglangEngine
from headway.adapters.engines.vllm.admin import VllmEngine
from headway.errors import EngineFailed
from headway.settings import EngineSection
from headway.testing import EngineScript, FakeEngine, Reply, Rule


@pytest.mark.parametrize(
    ("kind", "speaks", "told"),
    [
        (VllmEngine, "sglang", r"answered 404: .*VLLM_SERVER_DEV_MODE=1\? is it a vLLM \(engine.kind\)\?"),
        (SglangEngine, "vllm", r"answered 404: .*is it an SGLang \(engine.kind\)\?"),
    ],
)
async def test_a_server_of_the_other_kind_is_asked_for_what_it_has_not(kind, speaks, told):
    async with FakeEngine(script=EngineScript(speaks=speaks)) as server:
        engine = kind("engine-0", server.url, EngineSection())
        with pytest.raises(EngineFailed, match=told):
            await engine.label()
        await engine.close()


async def test_a_key_that_is_missing_is_named():
    async with FakeEngine([Rule(match={"path": "/weight_info"}, do=Reply(status=401, text="Unauthorized"))]) as server:
        engine = VllmEngine("engine-0", server.url, EngineSection())
        with pytest.raises(EngineFailed, match=r"answered 401: Unauthorized \(its key is to be in HEADWAY_ENGINE_KEY"):
            await engine.label()
        await engine.close()
