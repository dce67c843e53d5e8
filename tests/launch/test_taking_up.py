"""A run on disk is taken up again: which version and lineage, which batches and rows, what is compared and said, in which order."""

import asyncio
import json
import logging
import shutil
import threading
import time
from pathlib import Path

import msgspec
import pytest
from run_disk import ID, LINE, Disk, config_of, info_of, inputs
from small_rollouts import small_batch, small_rollout

from headway.adapters.batch_store import DirectoryBatchStore, stored_batch
from headway.adapters.journal.sqlite import SqliteJournal
from headway.config import resolved, state_path
from headway.errors import ConfigError, RunFailed, StorageError
from headway.events import BatchAcknowledged, ConfigChanged, Resumed
from headway.formats.hold import alone
from headway.formats.run_directory import RunDirectory, load_run_info, save_run_info
from headway.launch.events_log import logged_to
from headway.launch.resume import changed_keys
from headway.launch.versions import newest_version
from headway.rules.lineage import Line


def names(directory):
    return sorted(path.name for path in directory.iterdir())


async def test_a_run_goes_on_from_its_newest_version_with_its_batches_and_groups(disk):
    await disk.write(formed=3, trained=2, loose=1)
    before = (disk.run.batch(2) / "manifest.json").read_bytes()
    found = await disk.taken_up()
    assert found.first.version == 2
    assert (found.first.label, found.first.directory) == (f"{LINE}-2", str(disk.run.weight(2)))
    assert [k for k, _ in found.resumption.shipped_again] == [2]
    row = dict(found.resumption.shipped_again[0][1])
    assert (row["batch"], row["groups"]) == (2, 2)
    assert (disk.run.batch(2) / "manifest.json").read_bytes() == before, "it is shipped again as it is"
    assert [group.admission.group for group in found.resumption.ready] == [6]
    info = load_run_info(disk.run)
    assert (info.id, info.lineage, info.created, info.resumes, info.ended) == (ID, LINE, 5.0, 1, None)


async def test_the_rollouts_of_what_goes_on_are_read_from_where_their_stubs_say(disk):
    await disk.write(loose=1)
    async with disk.resuming() as (resume, history, journal):
        found = await resume.take_up(journal, history, inputs())
        (group,) = found.resumption.ready
        for stub in group.rollouts:
            assert await journal.read(stub.reference) == small_rollout(0, stub.member)


async def test_batches_that_were_trained_while_nobody_looked_are_acknowledged_at_the_time_of_their_weights(disk):
    await disk.write(formed=2)
    disk.trained(0, row=False)
    found = await disk.taken_up()
    assert found.first.version == 1
    (event,) = [event for event in await disk.events() if isinstance(event, BatchAcknowledged)]
    assert event == BatchAcknowledged((disk.run.weight(1) / "manifest.json").stat().st_mtime, 0)


async def test_a_trainer_that_has_outlived_its_orchestrator_finishes_its_commit_before_anything_is_decided(tmp_path):
    disk = await Disk(tmp_path / "run", trainer="embedded").write(formed=2, trained=1)

    def outlive(begun):
        with alone(disk.run.trainer_lock):
            begun.set()
            end = time.monotonic() + 60
            while sum(link.resolve() == disk.run.trainer_lock for link in Path("/proc/self/fd").iterdir() if link.exists()) < 2:
                assert time.monotonic() < end, "nobody else has come for the lock"
                time.sleep(0.005)
            disk.trained(1)

    begun = threading.Event()
    trainer = asyncio.create_task(asyncio.to_thread(outlive, begun))
    await asyncio.to_thread(begun.wait)
    found = await disk.taken_up()
    await trainer
    disk.run.close()
    assert found.first.version == 2
    assert list(found.resumption.shipped_again) == []


async def test_rows_that_a_crash_kept_from_being_written_are_there_once_after_any_number_of_resumes(disk):
    await disk.write(formed=3, trained=1)
    disk.trained(1, row=False)
    with disk.run.metrics_jsonl.open("ab") as file:
        file.write(b'{"batch": 1, "rewa')
    for _ in range(3):
        await disk.taken_up()
    rows = disk.rows()
    assert [row["batch"] for row in rows] == [0, 1]
    assert (rows[1]["groups"], rows[1]["loss"]) == (2, 0.1)


async def test_a_row_that_a_stopped_run_wrote_before_the_trainer_had_measured_gets_its_figures(disk):
    await disk.write(formed=3, trained=1)
    disk.trained(1, row=False)
    with disk.run.metrics_jsonl.open("a") as file:
        file.write('{"batch": 1, "groups": 2}\n')
    for _ in range(2):
        await disk.taken_up()
    assert [(row["batch"], row["loss"]) for row in disk.rows()] == [(0, 0.0), (1, 0.1)]


@pytest.mark.parametrize("trainer", ["directory", "embedded"])
async def test_damaged_weights_are_set_aside_and_training_goes_back_under_a_new_lineage(tmp_path, trainer, caplog):
    disk = await Disk(tmp_path / "run", trainer=trainer).write(formed=3, trained=2)
    (disk.run.weight(2) / "model.bin").write_bytes(b"weights?" * 100)
    with caplog.at_level(logging.WARNING, "headway"):
        found = await disk.taken_up()
    assert "SHA-256 differs" in caplog.text
    assert "training goes back from version 2 to 1" in caplog.text
    lineage = found.info.lineage
    assert lineage != LINE
    assert (found.info.parent, found.info.lineages) == (f"{LINE}-1", {LINE: None, lineage: f"{LINE}-1"})
    assert (found.first.label, found.first.directory) == (f"{lineage}-1", str(disk.run.weight(1)))
    assert [name[:17] for name in names(disk.run.weights)] == [".damaged-00000002", "00000000", "00000001"]
    assert names(disk.run.batches) == ["00000000"], "batches of the line that ended are formed anew"
    assert [group.admission.group for group in found.resumption.ready] == [2, 3]
    assert [row["batch"] for row in disk.rows()] == [0]
    undone = (disk.path / f"metrics-{LINE}.jsonl").read_text().splitlines()
    assert [json.loads(line)["batch"] for line in undone] == [1]

    again = await disk.taken_up()
    assert (again.info.lineage, again.info.resumes) == (lineage, 2), "what has gone back once stays where it is"
    disk.weights(2, lineage=lineage)
    disk.run.close()


async def test_a_process_that_dies_after_it_has_named_a_new_lineage_and_before_the_journal_has_it_leaves_no_harm(disk):
    await disk.write(formed=2, trained=2, loose=1)
    shutil.rmtree(disk.run.weight(2))
    save_run_info(disk.run, info_of(lineage="bbbbbb", lineages={LINE: None, "bbbbbb": f"{LINE}-1"}))
    found = await disk.taken_up()
    assert found.info.parent == f"{LINE}-1"
    assert found.info.lineage not in {LINE, "bbbbbb"}
    assert [group.admission.group for group in found.resumption.ready] == [2, 3]


async def test_weights_that_vanished_before_they_were_acknowledged_are_made_again_on_the_same_line(disk):
    await disk.write(formed=2, trained=1)
    disk.weights(2)
    (disk.run.weight(2) / "model.bin").write_bytes(b"")
    found = await disk.taken_up()
    assert (found.first.version, found.info.lineage) == (1, LINE)
    assert [k for k, _ in found.resumption.shipped_again] == [1]


async def test_a_version_without_the_trainers_state_is_none_for_the_trainer_that_needs_it(tmp_path):
    disk = await Disk(tmp_path / "run", trainer="embedded").write(formed=2, trained=2)
    shutil.rmtree(disk.run.trainer_state(2))
    assert (await disk.taken_up()).first.version == 1
    disk.run.close()


def test_what_others_wrote_is_set_aside_and_said(tmp_path):
    disk = Disk(tmp_path / "run")
    disk.weights(0)
    disk.weights(3, lineage="theirs")
    disk.run.weight(5).mkdir()
    said = []
    assert newest_version(disk.run, Line(LINE), with_state=False, say=said.append) == 0
    assert "00000005: has no valid manifest; weights/00000005 is set aside as .damaged-00000005-" in said[0]
    assert (
        "was written for lineage theirs, which is not this run's at version 3; weights/00000003 is set aside as .foreign-00000003-"
        in said[1]
    )
    assert [name for name in names(disk.run.weights) if not name.startswith(".")] == ["00000000"]
    disk.run.close()


async def test_directories_of_batches_that_are_dissolved_or_unknown_are_removed_and_no_others(disk):
    await disk.write(formed=3, trained=1)
    (disk.run.batch(1) / "batch.safetensors").write_bytes(b"garbled")
    await DirectoryBatchStore(disk.run, LINE).write(small_batch(7, version=6))
    (disk.run.batches / ".tmp-00000009-ab").mkdir()
    found = await disk.taken_up()
    assert names(disk.run.batches) == ["00000000"]
    assert (found.resumption.shipped_again, found.resumption.ledger.next_batch) == ([], 1)
    assert len(found.resumption.ready) == 4


async def test_a_damaged_batch_tells_that_it_is_not_there(disk, caplog):
    await disk.write(formed=1)
    assert stored_batch(disk.run, 0).lineage == LINE
    (disk.run.batch(0) / "batch.safetensors").write_bytes(b"garbled")
    with caplog.at_level(logging.WARNING, "headway"):
        assert stored_batch(disk.run, 0) is None
    assert "batch 0 is formed anew" in caplog.text
    assert stored_batch(disk.run, 1) is None


async def test_a_config_that_has_changed_is_told_in_the_journal_and_coupled_keys_are_warned_of(disk, caplog):
    await disk.write(loose=1)
    changed = config_of(disk.path, steps=20, max_staleness=4, max_concurrent=99)
    with caplog.at_level(logging.INFO, "headway"):
        await disk.taken_up(changed)
    keys = ("rollout.max_concurrent", "rollout.max_staleness", "run.steps")
    assert [event.keys for event in await disk.events() if isinstance(event, ConfigChanged)] == [keys]
    assert "rollout.max_concurrent, rollout.max_staleness have changed together" in caplog.text
    assert disk.run.config.read_text() == resolved(changed)
    await disk.taken_up(changed)
    assert len([event for event in await disk.events() if isinstance(event, ConfigChanged)]) == 1


async def test_one_key_that_has_changed_is_no_reason_to_warn(disk, caplog):
    await disk.write()
    with caplog.at_level(logging.WARNING, "headway"):
        await disk.taken_up(config_of(disk.path, max_staleness=4))
    assert not caplog.records


async def test_other_versions_of_headway_engine_and_trainer_are_pointed_out_and_recorded(disk, caplog):
    await disk.write()
    now = info_of(id="new", headway_version="2", engine_version="e2", trainer_version="t1")
    with caplog.at_level(logging.WARNING, "headway"):
        found = await disk.taken_up(now=now)
    assert [record.getMessage() for record in caplog.records] == ["headway was 1 and is 2 now", "the engine was e1 and is e2 now"]
    assert (found.info.headway_version, found.info.engine_version, found.info.id) == ("2", "e2", ID)


def test_changed_keys_are_those_of_either_side():
    assert changed_keys("a = 1\n[b]\nc = 2\nd = 3\n", "a = 1\n[b]\nc = 4\ne = 5\n") == ["b.c", "b.d", "b.e"]
    assert changed_keys("this is no toml", "a = 1") is None
    assert changed_keys("", "a = 1") is None


async def test_figures_that_are_damaged_do_not_keep_a_run_down(disk, caplog):
    await disk.write(formed=1, loose=1)
    disk.trained(0, row=False)
    disk.run.trainer_metric(0).write_bytes(b'{"loss": \xff')
    disk.run.metrics_jsonl.write_bytes(b"\x00\x00\xff\nno row\n")
    with caplog.at_level(logging.WARNING, "headway"):
        await disk.taken_up()
    assert [(row["batch"], "loss" in row) for row in disk.rows()] == [(0, False)]
    assert "the row of batch 0 goes without what it says" in caplog.text
    assert "metrics.jsonl: 2 lines are no rows and are taken out" in caplog.text


def test_a_log_that_cannot_be_opened_is_refused_by_name(tmp_path):
    (tmp_path / "events.log").mkdir()
    with pytest.raises(StorageError, match=r"events\.log: cannot be opened"), logged_to(tmp_path / "events.log"):
        pass


@pytest.mark.parametrize("damage", [None, b"", b"[run]\nname = ", b"\xff\xfe"])
async def test_a_config_of_the_process_before_that_is_damaged_is_told_and_written_anew(disk, caplog, damage):
    await disk.write(loose=1)
    disk.run.config.unlink() if damage is None else disk.run.config.write_bytes(damage)
    with caplog.at_level(logging.WARNING, "headway"):
        await disk.taken_up()
    assert "config.toml: is missing or damaged, and written anew" in caplog.text
    assert disk.run.config.read_text() == resolved(disk.config)
    assert not [event for event in await disk.events() if isinstance(event, ConfigChanged)]


async def test_weights_without_the_journal_that_goes_with_them_are_refused_with_the_remedy(disk):
    await disk.write(formed=2, trained=2)
    shutil.rmtree(disk.run.state)
    with pytest.raises(RunFailed, match=r"the journal knows of 0 batches.*restore run\.state_directory, or start a new run"):
        await disk.taken_up()


async def test_a_run_all_of_whose_weights_are_gone_is_no_run_to_go_on_with(disk):
    await disk.write(formed=2, trained=2)
    for directory in disk.run.weights.iterdir():
        shutil.rmtree(directory)
    with pytest.raises(RunFailed, match="holds no complete version, and 2 batches were trained: restore the weights"):
        await disk.taken_up()


def test_a_disk_that_does_not_answer_is_no_damage(tmp_path):
    disk = Disk(tmp_path / "run")
    for version in (0, 1):
        disk.weights(version)
    manifest = disk.run.weight(1) / "manifest.json"
    content = json.loads(manifest.read_text())
    content["files"]["x" * 300] = {"size": 1, "sha256": ""}  # ENAMETOOLONG stands for any trouble but a file that is gone
    manifest.write_text(json.dumps(content))
    with pytest.raises(StorageError, match="cannot be read"):
        newest_version(disk.run, Line(LINE), with_state=False, say=print)
    assert names(disk.run.weights) == ["00000000", "00000001"], "nothing is set aside"
    disk.run.close()


async def test_a_journal_of_another_run_is_refused(disk):
    await disk.write(info=info_of())
    save_run_info(disk.run, msgspec.structs.replace(info_of(), id="other"))
    disk.run.close()
    with pytest.raises(StorageError, match="belongs to run"):
        SqliteJournal(state_path(disk.config), run_id=load_run_info(disk.run).id)


# ---- the directory -----------------------------------------------------------------------------------------------------------------


async def test_a_second_process_is_refused_while_the_first_lives(disk):
    await disk.write()
    with pytest.raises(ConfigError, match="in use by a live run"):
        RunDirectory.take_up(disk.path)


def test_where_nothing_or_half_a_start_lies_a_run_can_start(tmp_path):
    assert RunDirectory.take_up(tmp_path / "run") is None
    run = RunDirectory.create(tmp_path / "run")
    run.config.write_text("half")
    (run.path / ".tmp-run.json-ab").write_text("half")
    run.close()
    assert RunDirectory.take_up(run.path) is None
    RunDirectory.create(run.path).close()


def test_files_that_are_no_runs_are_left_alone_and_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    assert RunDirectory.take_up(tmp_path / "run") is None
    with pytest.raises(ConfigError, match="is not empty"):
        RunDirectory.create(tmp_path / "run")
    assert (tmp_path / "run" / "thesis.tex").read_text() == "mine"


async def test_the_events_of_a_resume_are_the_last_in_the_journal(disk):
    await disk.write(formed=1, loose=2)
    await disk.taken_up()
    assert isinstance((await disk.events())[-1], Resumed)
