"""`headway run CONFIG --resume`, as far as it goes without a child: what is over, what is refused, what is left alone."""

import asyncio
import json
import signal

import pytest
from run_disk import LINE, Disk, info_of

from headway.config import load_config
from headway.errors import ConfigError, RunFailed, StorageError
from headway.events import Ended
from headway.formats.run_directory import RunDirectory, load_run_info, save_run_info
from headway.launch.interrupts import Interrupted, stopped_by
from headway.launch.run import owned, run
from headway.protocols import Entry

CONFIG = """
[run]
name = "r"
steps = {steps}
directory = "{path}"
[model.init]
[rollout]
groups_per_batch = 2
group_size = 2
max_staleness = 2
[prompts]
source = "prompts.jsonl"
[environment]
entry = "world:attempt"
"""


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"id": f"prompt-{number}"}) for number in range(9)))
    disk = Disk(tmp_path / "run")
    yield disk
    disk.run.close()


def resume(disk, *, steps=2):
    """Play `headway run --resume` in this process."""
    disk.run.close()
    path = disk.path.parent / "run.toml"
    path.write_text(CONFIG.format(steps=steps, path=disk.path))
    return run(load_config(path), config_path=path, resume=True)


async def _finished(disk):
    await disk.write(formed=2, trained=2)
    async with disk.journal() as journal:
        await journal.append([Entry(Ended(9.0, 0, "all 2 steps are trained"))])


def files_of(disk):
    """Return what lies in the run, but for the log and the lock, with contents."""
    return {
        path.relative_to(disk.path): path.read_bytes()
        for path in disk.path.rglob("*")
        if path.is_file() and path.name not in {"events.log", "lock"} and "state" not in path.parts
    }


def test_a_finished_run_exits_with_0_and_nothing_is_started_or_changed(disk, capfd):
    asyncio.run(_finished(disk))
    before = files_of(disk)
    assert resume(disk) == 0
    assert "nothing to do: all 2 steps are trained" in capfd.readouterr().out
    assert files_of(disk) == before
    assert not list(disk.run.logs.iterdir()), "no child was started"


def test_weights_that_the_journal_does_not_know_end_with_1_and_are_left_as_they_are(disk):
    async def prepare():
        await disk.write(formed=1)
        disk.weights(2)

    asyncio.run(prepare())
    with pytest.raises(RunFailed, match="the journal knows of 1 batches"):
        resume(disk, steps=5)
    info = load_run_info(disk.run)
    assert (info.ended.code, info.resumes, info.lineage) == (1, 0, LINE)
    assert disk.run.weight(2).exists()
    assert not list(disk.run.logs.iterdir())


def test_a_state_directory_without_the_journal_is_named_and_no_journal_is_begun_there(disk):
    asyncio.run(disk.write(formed=1))
    journal = disk.run.state / "events.sqlite"
    journal.rename(disk.path.parent / "kept.sqlite")
    with pytest.raises(StorageError, match=r"state: holds no journal, and .*run has batches .* set run\.state_directory"):
        resume(disk)
    assert not journal.exists()


def test_a_directory_with_a_live_run_is_refused(disk):
    asyncio.run(disk.write(formed=1))
    disk.run.close()
    owner = RunDirectory.take_up(disk.path)
    with pytest.raises(ConfigError, match="in use by a live run"):
        resume(disk)
    owner.close()


def test_a_signal_before_the_run_hears_of_signals_leaves_an_ending_and_never_takes_one_away(disk):
    save_run_info(disk.run, info_of())
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 143)):
        with pytest.raises(Interrupted), owned(disk.run):
            raise stopped_by(number)
        assert load_run_info(disk.run).ended.code == code


def test_a_signal_before_there_is_a_run_leaves_none(tmp_path):
    directory = RunDirectory.create(tmp_path / "run")
    with pytest.raises(Interrupted), owned(directory):
        raise stopped_by(signal.SIGINT)
    assert RunDirectory.take_up(tmp_path / "run") is None
