"""A disk that is full, read-only, broken or gone: the run hears the cause, and nothing half-written is taken as whole.

The disks are real (`faulty_disks`): a tmpfs of a megabyte, and a kernel that answers EIO to every sync.
"""

import asyncio

import pytest
from faulty_disks import can_break, on_disk, on_small_disk
from small_rollouts import small_rollout

from headway.adapters.journal.sqlite import SqliteJournal
from headway.events import Finished
from headway.formats.run_directory import RunDirectory, load_run_info

pytestmark = pytest.mark.e2e
broken = pytest.mark.skipif(not can_break(), reason="no way to break a disk on this machine")

JOURNAL = """
from headway.adapters.journal.sqlite import SqliteJournal
from headway.events import Admitted, Published
from headway.protocols import Entry

def open_journal():
    return SqliteJournal(disk / "state", run_id="run-1")

def entry(number, tokens):
    return finished(small_rollout(number, tokens=tokens)) if tokens else Entry(Admitted(1.0, number, f"prompt-{number}", 0, 1, 0))

async def append_until_it_fails(journal, tokens):
    written = []
    try:
        while True:
            written += await journal.append([entry(len(written), tokens)])
    except StorageError as error:
        return written, error
"""

GOES_ON = """
async def main():
    journal = open_journal()
    first = await journal.append([entry(0, int(arguments[0]))])
    ballast = fill(disk, leave=int(arguments[1]))
    written, error = await append_until_it_fails(journal, int(arguments[0]))
    assert str(error).endswith("free space on the disk, then resume"), error
    again, same = await append_until_it_fails(journal, 0)
    assert not again and str(same) == str(error)
    try:
        await journal.close()
    except StorageError:
        pass
    ballast.unlink()
    journal = open_journal()
    events = list(journal.replay())
    assert events[: 1 + len(written)] == [*first, *written] and len(events) <= 2 + len(written), (len(events), len(written))
    for event in events:
        if getattr(event, "reference", None):
            assert await journal.read(event.reference) == small_rollout(event.group, tokens=int(arguments[0]))
    assert await journal.append([entry(1000, 100)])
    await journal.close()
    print(len(written))

asyncio.run(main())
"""


@pytest.mark.parametrize(("tokens", "leave"), [(0, 0), (0, 100_000), (1000, 0), (1000, 100_000), (1000, 101_000), (20_000, 300_000)])
def test_a_journal_on_a_full_disk_keeps_what_it_returned_and_goes_on_once_there_is_room(tmp_path, tokens, leave):
    on_small_disk(tmp_path, JOURNAL + GOES_ON, str(tokens), str(leave))


BEGINS = """
async def main():
    ballast = fill(disk, leave=int(arguments[0]))
    try:
        journal = open_journal()
        await journal.append([entry(0, 1000)])
        await journal.close()
    except StorageError as error:
        assert "free space" in str(error), error
    else:
        raise AssertionError("there was room")
    ballast.unlink()
    journal = open_journal()
    assert list(journal.replay()) == []
    assert not list((disk / "state").glob(".tmp-*"))
    assert await journal.append([entry(0, 1000)])
    await journal.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("leave", [0, 4096, 8192, 16_384, 24_576, 40_960])
def test_a_journal_that_has_no_room_to_begin_is_begun_anew_later(tmp_path, leave):
    on_small_disk(tmp_path, JOURNAL + BEGINS, str(leave))


BATCH = """
from headway.adapters.batch_store import DirectoryBatchStore
from headway.formats.batch import read_batch
from headway.formats.run_directory import RunDirectory

run = RunDirectory.create(disk / "run")
store = DirectoryBatchStore(run, "line")
asyncio.run(store.write(small_batch(0)))
"""

BATCH_FULL = """
ballast = fill(disk, leave=int(arguments[0]))
try:
    asyncio.run(store.write(small_batch(1)))
except StorageError as error:
    assert "free space" in str(error), error
else:
    raise AssertionError("there was room")
assert [path.name for path in run.batches.iterdir()] == ["00000000"], list(run.batches.iterdir())
ballast.unlink()
asyncio.run(store.write(small_batch(1)))
assert [read_batch(run.batch(k)).k for k in range(2)] == [0, 1]
"""


@pytest.mark.parametrize("leave", range(0, 16_384, 4096))
def test_a_batch_that_has_no_room_leaves_nothing_and_can_be_written_later(tmp_path, leave):
    on_small_disk(tmp_path, BATCH + BATCH_FULL, str(leave))


RUN_JSON = """
from headway.formats.run_directory import Ending, RunDirectory, RunInfo, load_run_info, save_run_info
import msgspec

run = RunDirectory.create(disk / "run")
info = RunInfo(id="1", lineage="a", headway_version="0", engine_version="0", trainer_version="0", seed=0, created=0.0)
save_run_info(run, info)
"""

RUN_JSON_FULL = """
fill(disk)
try:
    save_run_info(run, msgspec.structs.replace(info, ended=Ending(0, "done", 1.0)))
except StorageError as error:
    assert "free space on the disk, then resume" in str(error), error
else:
    raise AssertionError("there was room")
assert load_run_info(run) == info
assert not list(run.path.glob(".tmp-*"))
"""


def test_run_json_on_a_full_disk_stays_as_it_was(tmp_path):
    on_small_disk(tmp_path, RUN_JSON + RUN_JSON_FULL)


ROWS = """
from headway.adapters.exporters.jsonl import JsonlExporter
from headway.formats.run_directory import RunDirectory

run = RunDirectory.create(disk / "run")
exporter = JsonlExporter(run)
exporter.export("metrics", {"batch": 0})
ballast = fill(disk)
for batch in range(1, 200):
    exporter.export("metrics", {"batch": batch, "more": "x" * 100})
assert exporter.failures
rows = [json.loads(line) for line in run.metrics_jsonl.read_text().splitlines()]
assert [row["batch"] for row in rows] == list(range(len(rows)))
ballast.unlink()
exporter.export("metrics", {"batch": 200})
exporter.close()
assert [json.loads(line)["batch"] for line in run.metrics_jsonl.read_text().splitlines()] == [*range(len(rows)), 200]
"""


def test_rows_of_metrics_on_a_full_disk_are_lost_whole(tmp_path):
    on_small_disk(tmp_path, ROWS)


READ_ONLY = """
from headway.adapters.batch_store import DirectoryBatchStore
from headway.formats.run_directory import RunDirectory

async def main():
    journal = open_journal()
    await journal.append([entry(0, 100)])
    await journal.close()
    run = RunDirectory.create(disk / "run")
    run.close()
    remount(disk, "ro")
    for what in (open_journal, lambda: asyncio.run(DirectoryBatchStore(run, "line").write(small_batch()))):
        try:
            await asyncio.to_thread(what)
        except StorageError as error:
            assert "read" in str(error) and "mount it for writing" in str(error), error
        else:
            raise AssertionError("it could write")
    for path in (disk / "run", disk / "new"):
        try:
            RunDirectory.create(path)
        except ConfigError as error:
            assert "Read-only file system" in str(error), error
        else:
            raise AssertionError("it could write")

asyncio.run(main())
"""


def test_a_read_only_disk_is_named_with_the_remedy(tmp_path):
    on_small_disk(tmp_path, JOURNAL + READ_ONLY)


GONE = """
from headway.adapters.disks import Disks

subprocess.run(["umount", "-l", str(disk)], check=True)
for write in (lambda: asyncio.run(store.write(small_batch(1))), lambda: asyncio.run(Disks([run.path]).free_space())):
    try:
        write()
    except StorageError as error:
        assert "No such file" in str(error), error
    else:
        raise AssertionError("it was written beside the disk")
assert not list(disk.iterdir())
"""


def test_nothing_is_written_beside_a_mount_that_is_gone(tmp_path):
    on_small_disk(tmp_path, BATCH + GONE)


BROKEN_JOURNAL = """
async def main():
    journal = open_journal()
    written = list(await journal.append([entry(0, 100)]))
    break_the_disk()
    _, error = await append_until_it_fails(journal, int(arguments[0]))
    assert "check" in str(error) and "error" in str(error), error
    again, same = await append_until_it_fails(journal, 0)
    assert not again and str(same) == str(error)
    os._exit(0)

asyncio.run(main())
"""


@broken
@pytest.mark.parametrize("tokens", [0, 100])
def test_a_disk_that_fails_ends_the_journal_with_the_cause_and_takes_nothing_durable_away(tmp_path, tokens):
    on_disk(tmp_path, JOURNAL + BROKEN_JOURNAL, str(tokens))

    async def check():
        journal = SqliteJournal(tmp_path / "state", run_id="run-1")
        events = list(journal.replay())
        assert isinstance(events[0], Finished)
        assert events[0].reference is not None
        assert await journal.read(events[0].reference) == small_rollout(0, tokens=100)
        assert len(events) <= 2
        await journal.close()

    asyncio.run(check())


BROKEN_FILES = """
break_the_disk()
for write in (lambda: asyncio.run(store.write(small_batch(1))), lambda: save_run_info(run, msgspec.structs.replace(info, seed=1))):
    try:
        write()
    except StorageError as error:
        assert "the disk, or the mount, has failed: check it, then resume" in str(error), error
    else:
        raise AssertionError("it could write")
"""


@broken
def test_files_that_could_not_be_synced_are_not_there(tmp_path):
    on_disk(tmp_path, RUN_JSON + BATCH.replace('RunDirectory.create(disk / "run")', "run") + BROKEN_FILES)
    run = RunDirectory(tmp_path / "run")
    assert [path.name for path in run.batches.iterdir()] == ["00000000"]
    assert load_run_info(run).seed == 0
    assert not list(run.path.glob(".tmp-*"))
