"""run.json while a run plays: what engines and trainer say of themselves is written when it is known, and a change is pointed out."""

import asyncio
import logging

import msgspec
import pytest
from run_disk import info_of

from headway.formats.run_directory import Ending, RunDirectory, load_run_info, save_run_info
from headway.formats.software import UNKNOWN
from headway.launch.record import RunRecord


class Engine:
    def __init__(self, software):
        self.says = software

    async def software(self):
        return self.says


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    yield run
    run.close()


async def written(run, info):
    async with asyncio.timeout(20):
        while load_run_info(run) != info:  # noqa: ASYNC110 -- a thread writes
            await asyncio.sleep(0)


async def test_what_was_not_known_is_written_and_nothing_is_pointed_out(run, caplog):
    record = RunRecord(run, info_of(engine_version=UNKNOWN, trainer_version=UNKNOWN))
    save_run_info(run, record.info)
    keeping = asyncio.create_task(record.keep([Engine("vllm 2"), Engine("vllm 1"), Engine("vllm 2")]))
    await written(run, info_of(engine_version="vllm 1, vllm 2", trainer_version=UNKNOWN))
    record.trainer_is("trl 1")
    record.trainer_is("trl 1")
    await written(run, info_of(engine_version="vllm 1, vllm 2", trainer_version="trl 1"))
    keeping.cancel()
    assert not [entry for entry in caplog.records if entry.levelno >= logging.WARNING]


async def test_a_change_is_pointed_out_once_and_the_end_keeps_what_is_known(run, caplog, capsys):
    record = RunRecord(run, info_of(engine_version="vllm 1", trainer_version="trl 1"))
    save_run_info(run, record.info)
    keeping = asyncio.create_task(record.keep([Engine("vllm 2")]))
    for software in ("trl 1", UNKNOWN, UNKNOWN):
        record.trainer_is(software)
    await written(run, info_of(engine_version="vllm 2", trainer_version=UNKNOWN))
    keeping.cancel()
    said = ["the trainer was trl 1 and is unknown now", "the engine was vllm 1 and is vllm 2 now"]
    assert [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING] == said
    assert capsys.readouterr().err.splitlines() == [f"headway: {line}" for line in said]
    ending = Ending(0, "done", 1.0)
    record.end(ending)
    assert load_run_info(run) == msgspec.structs.replace(record.info, ended=ending)


async def test_a_disk_that_does_not_take_it_is_told_and_ends_nothing(run, caplog):
    record = RunRecord(run, info_of(engine_version="vllm 1"))
    save_run_info(run, record.info)
    run.run_json.unlink()
    run.run_json.mkdir()
    keeping = asyncio.create_task(record.keep([Engine("vllm 2")]))
    async with asyncio.timeout(20):
        while "cannot be written" not in caplog.text:  # noqa: ASYNC110 -- a thread writes
            await asyncio.sleep(0)
    assert not keeping.done()
    keeping.cancel()
