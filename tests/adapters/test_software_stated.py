"""What servers and trainers say of their own software is taken as text, or is unknown, and is never an error."""

import json
from typing import Any

import pytest
from scripted_engine import Break, ScriptedEngine, Status, Tokens

from headway.adapters.engines.vllm.admin import VllmEngine
from headway.adapters.trainers.directory import DirectoryTrainer
from headway.formats.manifest import publish, staging, write_manifest
from headway.formats.run_directory import RunDirectory
from headway.formats.software import LONGEST, UNKNOWN, stated
from headway.settings import EngineSection
from headway.testing.engine import EngineScript, FakeEngine

NONSENSE = [None, 3, "", " ", "a\nb", "\x1b[31m", "x" * (LONGEST + 1), ["vllm"], {"version": "1"}]


@pytest.mark.parametrize("value", NONSENSE)
def test_what_is_no_line_of_text_is_unknown(value):
    assert stated(value) == UNKNOWN


async def asked(*replies):
    async with ScriptedEngine(Tokens([1])) as server:
        server.refusals["/version"] = list(replies)
        engine = VllmEngine("engine-0", server.url, EngineSection(), retries=1)
        try:
            return await engine.software()
        finally:
            await engine.close()


@pytest.mark.parametrize(
    ("body", "software"),
    [
        ('{"version": "0.11.0"}', "vllm 0.11.0"),
        ('{"version": "0.11.0", "commit": "abc"}', "vllm 0.11.0"),
        ('{"version": "0.1.0", "software": "headway"}', "headway 0.1.0"),
        *((json.dumps({"version": value}), UNKNOWN) for value in NONSENSE if value != " "),
        ("", UNKNOWN),
        ("0.11.0", UNKNOWN),
        ('{"version": ' + "[" * 100_000, UNKNOWN),
        ('{"version": "1", "software": "' + "x" * 2**21 + '"}', UNKNOWN),
    ],
)
async def test_an_engine_is_what_it_says_at_version_or_unknown(body, software):
    assert await asked(Status(200, body)) == software


async def test_an_engine_that_does_not_say_is_unknown_and_one_that_is_busy_is_asked_again():
    assert await asked() == UNKNOWN  # 404
    assert await asked(Status(401, "who are you")) == UNKNOWN
    assert await asked(Break(), Break()) == UNKNOWN
    assert await asked(Status(503, "busy"), Status(200, '{"version": "0.11.0"}')) == "vllm 0.11.0"


async def test_a_fake_engine_says_which_vllm_its_script_makes_it():
    async with FakeEngine(script=EngineScript(version="0.12.1")) as server:
        engine = VllmEngine("engine-0", server.url, EngineSection())
        assert await engine.software() == "vllm 0.12.1"
        await engine.close()


async def test_a_trainer_is_what_the_manifests_of_its_weights_say(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    heard = []
    trainer = DirectoryTrainer(run, "ab12", 0.001, lambda: None, software=heard.append)
    stated: list[dict[str, Any]] = [{"software": "trl 0.20"}, {}, *({"software": value} for value in NONSENSE)]
    for version, extra in enumerate(stated, start=1):
        temporary = staging(run.weight(version))
        (temporary / "model.safetensors").write_bytes(b"weights")
        write_manifest(temporary, kind="weights", lineage="ab12", id=version, extra=extra)
        publish(temporary, run.weight(version))
        assert (await trainer.checkpoint(version - 1)).version == version
    assert heard == ["trl 0.20", UNKNOWN, *(UNKNOWN for _ in NONSENSE)]
    run.close()
