"""The disks of a run: how much is free, and batch directories that go when nobody needs them."""

import os
import shutil
import subprocess
import sys

import pytest

from headway.adapters.disks import BatchDirectories, Disks
from headway.errors import StorageError
from headway.formats.hold import Hold
from headway.formats.run_directory import RunDirectory, numbered


@pytest.fixture
def run(tmp_path):
    """A run directory with the batches 0 to 4."""
    run = RunDirectory(tmp_path / "run")
    for k in range(5):
        run.batch(k).mkdir(parents=True)
        (run.batch(k) / "manifest.json").write_text("{}")
        (run.batch(k) / "batch.safetensors").write_bytes(b"x" * 100)
    return run


async def test_the_fullest_disk_counts(tmp_path):
    free, where = await Disks([tmp_path, tmp_path / "."]).free_space()
    facts = os.statvfs(tmp_path)
    assert 0 < free <= facts.f_blocks * facts.f_frsize
    assert where == str(tmp_path)


async def test_a_directory_that_is_gone_is_an_error_that_names_it(tmp_path):
    with pytest.raises(StorageError, match=r"gone: does not say how much is free: No such file"):
        await Disks([tmp_path, tmp_path / "gone"]).free_space()


async def test_directories_below_a_batch_are_removed_and_nothing_else(run):
    (run.batches / "notes").mkdir()
    await BatchDirectories(run).retire(3)
    assert numbered(run.batches) == [3, 4]
    assert sorted(path.name for path in run.batches.iterdir()) == ["00000003", "00000004", "notes"]


async def test_a_directory_that_somebody_holds_is_left_for_later(run):
    hold = Hold(run.batch(1))
    await BatchDirectories(run).retire(3)
    assert numbered(run.batches) == [1, 3, 4]
    hold.release()
    await BatchDirectories(run).retire(3)
    assert numbered(run.batches) == [3, 4]


RETIRE_AS_SOMEBODY_COMES = """
import asyncio, pathlib, sys
from headway.adapters.disks import BatchDirectories
from headway.formats.hold import Hold, is_held
from headway.formats.run_directory import RunDirectory

run = RunDirectory(pathlib.Path(sys.argv[1]))
came = []

def come(event, arguments):
    if event == "os.rename" and not came:
        came.append(event)
        hold = Hold(run.batch(1))  # as another process might, at the last moment
        hold.release()
        print("it was had" if not is_held(run.batch(1)) else "it was not to be had")

sys.addaudithook(come)
asyncio.run(BatchDirectories(run).retire(2))
"""


def test_nobody_can_begin_to_hold_a_directory_that_is_about_to_go(run):
    (run.batch(0) / "manifest.json").unlink()
    shutil.rmtree(run.batch(0))
    told = subprocess.run([sys.executable, "-c", RETIRE_AS_SOMEBODY_COMES, str(run.path)], capture_output=True, text=True, check=True)
    assert (told.stdout, told.stderr) == ("it was not to be had\n", "")
    assert numbered(run.batches) == [2, 3, 4]


async def test_a_disk_that_does_not_answer_keeps_old_batches_and_the_run(run, caplog):
    run.batches.rename(run.path / "elsewhere")
    run.batches.write_text("no directory")
    await BatchDirectories(run).retire(3)
    assert "old batches are not removed, will be tried again" in caplog.text
    assert "what lies there cannot be listed: Not a directory" in caplog.text
