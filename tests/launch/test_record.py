"""run.json while a run plays: what engines and trainer say of themselves is written when it is known, and a change is pointed out."""

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from run_disk import info_of

from headway.errors import EngineFailed
from headway.flow.engine_pool import EnginePool
from headway.formats.run_directory import Ending, RunDirectory, load_run_info, save_run_info
from headway.formats.software import UNKNOWN
from headway.launch.record import RunRecord
from headway.types import Checkpoint


class Engine:
    kind = "vllm"

    def __init__(self, name, software):
        self.name = name
        self.url = f"http://{name}"
        self.says = software
        self.asked = 0

    async def software(self):
        self.asked += 1
        return self.says


def serve(pool, engine):
    if engine.name not in {other.name for other in pool.engines}:
        pool.joins(engine)
    pool.serves(engine.name, Checkpoint(0, "line-0", "/weights"))
    return engine


def pool_of(*software):
    engines: list[Any] = [Engine(f"engine-{number}", says) for number, says in enumerate(software)]
    pool = EnginePool(engines, record=lambda _: None, clock=lambda: 0.0, lost_timeout_seconds=60.0)
    for engine in engines:
        serve(pool, engine)
    return pool


@asynccontextmanager
async def kept(record, pool):
    tasks = [asyncio.create_task(task) for task in (record.keep(), record.meet(pool))]
    yield
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()


def pointed_out(caplog):
    return [entry.getMessage() for entry in caplog.records if entry.name == "headway" and entry.levelno >= logging.WARNING]


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    yield run
    run.close()


async def until(condition):
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 -- a thread writes
            await asyncio.sleep(0)


async def written(run, info):
    await until(lambda: load_run_info(run) == info)


async def test_what_was_not_known_is_written_and_nothing_is_pointed_out(run, caplog):
    record = RunRecord(run, info_of(engine_version=UNKNOWN, trainer_version=UNKNOWN))
    save_run_info(run, record.info)
    async with kept(record, pool_of("vllm 2", "vllm 1", "vllm 2")):
        await written(run, info_of(engine_version="vllm 1, vllm 2", trainer_version=UNKNOWN))
        record.trainer_is("trl 1")
        record.trainer_is("trl 1")
        await written(run, info_of(engine_version="vllm 1, vllm 2", trainer_version="trl 1"))
    assert pointed_out(caplog) == []


async def test_a_change_is_pointed_out_once_and_the_end_keeps_what_is_known(run, caplog, capsys):
    record = RunRecord(run, info_of(engine_version="vllm 1", trainer_version="trl 1"))
    save_run_info(run, record.info)
    async with kept(record, pool_of("vllm 2")):
        for software in ("trl 1", UNKNOWN, UNKNOWN):
            record.trainer_is(software)
        await written(run, info_of(engine_version="vllm 2", trainer_version=UNKNOWN))
    said = ["the trainer was trl 1 and is unknown now", "the engine was vllm 1 and is vllm 2 now"]
    assert pointed_out(caplog) == said
    assert capsys.readouterr().err.splitlines() == [f"headway: {line}" for line in said]
    ending = Ending(0, "done", 1.0)
    record.end(ending)
    assert load_run_info(run) == msgspec.structs.replace(record.info, ended=ending)


@pytest.mark.parametrize("before", [UNKNOWN, "vllm 1"])
async def test_engines_that_join_are_asked_once_they_serve_and_software_that_is_new_to_the_run_is_pointed_out(run, before, caplog):
    record = RunRecord(run, info_of(engine_version=before, trainer_version=UNKNOWN))
    save_run_info(run, record.info)
    pool = pool_of("vllm 1")
    async with kept(record, pool):
        await until(lambda: pool.engines[0].asked)
        await written(run, info_of(engine_version="vllm 1", trainer_version=UNKNOWN))
        like, later = Engine("engine-1", "vllm 1"), Engine("engine-2", "sglang 5")
        pool.joins(later)
        serve(pool, like)
        await until(lambda: like.asked)
        assert (later.asked, pointed_out(caplog)) == (0, [])
        serve(pool, later)
        await written(run, info_of(engine_version="sglang 5, vllm 1", trainer_version=UNKNOWN))
        pool.leaves("engine-0")
        pool.lost("engine-2", EngineFailed("gone"))
        serve(pool, later)
        serve(pool, Engine("engine-3", "vllm 1"))
        await asyncio.sleep(0.01)
    assert (like.asked, later.asked) == (1, 1)
    assert record.info.engine_version == "sglang 5, vllm 1"
    assert pointed_out(caplog) == ["the engine was vllm 1 and is sglang 5, vllm 1 now"] * (before != UNKNOWN)


async def test_a_fleet_that_is_taken_up_again_one_by_one_is_what_it_was(run, caplog):
    record = RunRecord(run, info_of(engine_version="sglang 5, vllm 1", trainer_version=UNKNOWN))
    save_run_info(run, record.info)
    pool = pool_of()
    async with kept(record, pool):
        await asyncio.sleep(0)  # it looks who is there
        serve(pool, Engine("engine-0", "vllm 1"))
        await written(run, info_of(engine_version="vllm 1", trainer_version=UNKNOWN))
        serve(pool, Engine("engine-1", "sglang 5"))
        await written(run, info_of(engine_version="sglang 5, vllm 1", trainer_version=UNKNOWN))
    assert pointed_out(caplog) == []


async def test_a_fleet_that_the_config_names_and_that_lacks_one_kind_is_pointed_out(run, caplog):
    record = RunRecord(run, info_of(engine_version="vllm 1, vllm 2", trainer_version=UNKNOWN))
    save_run_info(run, record.info)
    async with kept(record, pool_of("vllm 2", "vllm 2")):
        await written(run, info_of(engine_version="vllm 2", trainer_version=UNKNOWN))
    assert pointed_out(caplog) == ["the engine was vllm 1, vllm 2 and is vllm 2 now"]


async def test_a_disk_that_does_not_take_it_is_told_and_ends_nothing(run, caplog):
    record = RunRecord(run, info_of(engine_version="vllm 1"))
    save_run_info(run, record.info)
    run.run_json.unlink()
    run.run_json.mkdir()
    async with kept(record, pool_of("vllm 2")):
        await until(lambda: "cannot be written" in caplog.text)
