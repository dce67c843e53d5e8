"""Fault cases of starts: fresh and resumed runs (B07), finished ones (B10), weights of others in their place (N03), ports (L08)."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest
from ingest_service import Service, body
from safetensors.numpy import save_file
from shipped import events_of

from headway.adapters.engines.vllm.admin import VllmEngine
from headway.errors import StorageError
from headway.events import BatchFormed, Published
from headway.formats.manifest import write_manifest
from headway.settings import EngineSection
from headway.testing import EngineScript, EnvironmentScript, FakeEngine, Stage, assert_run
from headway.testing.model import WEIGHTS_FILE
from headway.types import Checkpoint

INIT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 16,
}


def loads_of(engine):
    """How often an engine has loaded which version."""
    return Counter(entry["version"] for entry in engine.entries() if entry["what"] == "loaded")


@pytest.mark.e2e
def test_B07_B10_a_finished_run_has_nothing_to_do_and_with_more_steps_goes_on_behind_the_last(tmp_path):
    """Fresh, from a checkpoint of somebody else's: no version 0 is waited for. Then resumed: unchanged, and with more steps."""
    settings = {"run.steps": 3, "prompts.shuffle": False}
    with Stage(tmp_path, engines=[EngineScript()] * 2, environment=EnvironmentScript(prompts=30), settings=settings) as stage:
        ended = stage.play()
        assert ended.code == 0, ended.err
        stage.check(ended)
        assert not (stage.run / "weights" / "00000000").exists()
        assert all(loads_of(engine)[0] == 1 for engine in stage.engines)

        requests, rows = len(stage.requests("arrived", "asked")), stage.rows("metrics.jsonl")  # some may yet be told to have ended
        again = stage.play(resume=True)
        assert again.code == 0, again.err
        assert "nothing to do: all 3 steps are trained" in again.out
        assert (len(stage.requests("arrived", "asked")), stage.rows("metrics.jsonl")) == (requests, rows)
        stage.check(again)

        stage.engines[0].start()  # the first was started anew, the second serves version 3
        stage.trainer.start()
        before = [loads_of(engine) for engine in stage.engines]
        more = stage.play("run.steps=6", resume=True)
        assert more.code == 0, more.err
        stage.check(more)
        pushed = [loads_of(engine) - earlier for engine, earlier in zip(stage.engines, before, strict=True)]
        assert [each[3] for each in pushed] == [1, 0], "once to whom has it not"
        assert [sum(number < 3 for number in each) for each in pushed] == [0, 0]
        assert [event.k for event in events_of(stage, BatchFormed)] == list(range(6))
        consumed = [entry for entry in stage.trainer.entries() if entry["what"] == "consumed"]
        assert [entry["k"] for entry in consumed] == list(range(6))
        prompts = [prompt for entry in consumed for prompt in entry["prompts"]]
        assert sorted(prompts) == [f"p{number:04d}" for number in range(6 * 3)], "the data goes on where it was"


@pytest.mark.e2e
@pytest.mark.torch
def test_B07_with_the_embedded_trainer_fresh_and_resumed_runs_both_get_going(tmp_path):
    engine = EngineScript(vocabulary=57)  # the model's: its trainer says what comes after any of its ids
    settings = {"run.steps": 1, "model.path": "", "model.init": INIT, "trainer.kind": "embedded", "trainer.learning_rate": 1e-3}
    with Stage(tmp_path, engines=[engine], settings=settings) as stage:
        stage.trainer.kill()
        for steps, version in ((1, 0), (2, 1)):
            stage.engines[0].start()
            before = loads_of(stage.engines[0])
            ended = stage.play(f"run.steps={steps}", resume=steps > 1)
            assert ended.code == 0, ended.err
            assert_run(stage.run, engine_logs=stage.engine_logs, environment_logs=[stage.environment_log], exit_code=ended.code)
            assert (loads_of(stage.engines[0]) - before)[version] == 1, "pushed once"
        assert [event.version for event in events_of(stage, Published)] == [0, 1, 1, 2]


# ------------------------------------------------------------------------------------------------------------------------------------- N03


def write_shards(directory, version, *names):
    """Weights of a version, one tensor in the first file and the rest in the last."""
    directory.mkdir(exist_ok=True)
    tensors: dict[str, Any] = {"version": np.array([version], np.int64), "weight": np.full(16, version, np.float32)}
    parts = [tensors] if len(names) == 1 else [{"version": tensors["version"]}, {"weight": tensors["weight"]}]
    for name, part in zip(names, parts, strict=True):
        save_file(part, directory / name, {"format": "pt"})


@pytest.mark.e2e
def test_N03_weights_with_the_marker_of_another_run_are_not_loaded_nor_while_they_are_written_anew(tmp_path):
    with Stage(tmp_path, settings={"run.steps": 2}) as stage:
        assert stage.play().code == 0
        stage.trainer.kill()
        lineage, directory = stage.info()["lineage"], stage.run / "weights" / "00000003"

        def write_foreign():
            write_shards(directory, 99, WEIGHTS_FILE, "model-2.safetensors")
            write_manifest(directory, kind="weights", lineage="another", id=3)

        write_foreign()
        run = stage.start("run.steps=3", resume=True)
        stage.until_batch(2)

        def looked():
            """Let the run look at what lies there: it writes a row five times a second."""
            rows = len(stage.rows("pipeline.jsonl"))
            stage.until(lambda: len(stage.rows("pipeline.jsonl")) >= rows + 4)

        looked()
        assert not directory.exists()
        assert "was written for lineage another" in (stage.run / "events.log").read_text()
        write_foreign()  # again, while the run is under way
        looked()
        for path in directory.iterdir():  # the trainer begins version 3 in the same place, with one file instead of two
            path.unlink()
        write_shards(directory, 3, WEIGHTS_FILE)
        looked()
        assert loads_of(stage.engines[0])[3] == 0
        write_manifest(directory, kind="weights", lineage=lineage, id=3)
        ended = run.end()
        assert ended.code == 0, ended.err
        assert_run(stage.run, engine_logs=stage.engine_logs, environment_logs=[stage.environment_log], exit_code=0)
        loaded = [entry for entry in stage.engines[0].entries() if entry["what"] == "loaded"]
        assert [(entry["version"], entry["whole"]) for entry in loaded if entry["version"] >= 3] == [(3, True)]


async def test_N03_a_file_that_is_left_over_from_older_weights_is_refused_by_name_and_never_loaded(tmp_path):
    """Whoever writes anew in place without clearing: the manifest is right, and a file beside it is not in it."""
    write_shards(tmp_path / "00000003", 2, WEIGHTS_FILE, "model-2.safetensors")
    write_shards(tmp_path / "00000003", 3, WEIGHTS_FILE)
    async with FakeEngine() as server:
        engine = VllmEngine("engine-0", server.url, EngineSection())
        with pytest.raises(StorageError, match=r"weight, which .*: remove the file that is left over"):
            await engine.prepare(Checkpoint(3, "abc-3", str(tmp_path / "00000003")))
        await engine.close()
        assert not server.log.of("loaded")


# ------------------------------------------------------------------------------------------------------------------------------------- L08


async def test_L08_twenty_ingest_servers_start_at_once_and_each_tells_the_port_that_is_its_own(tmp_path):
    services = []
    for number in range(20):
        (tmp_path / f"{number}").mkdir()
        services.append(Service(tmp_path / f"{number}"))
    async with AsyncExitStack() as stack:
        await asyncio.gather(*(stack.enter_async_context(service.listening()) for service in services))
        assert len({service.address["url"] for service in services}) == 20
        for number, service in enumerate(services):
            await service.post(body(f"for {number}"))
    assert [service.taken for service in services] == [[f"for {number}"] for number in range(20)]
