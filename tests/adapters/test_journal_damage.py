"""A journal cut short at every byte, and with a bit flipped in every byte: a prefix is recovered or the file refused, nothing is invented.

Two states of the files are damaged: as a killed process leaves them (write-ahead log and all), and as an orderly end does. The database has
pages of 512 bytes, so that a small history fills many of them. By default a sample of the bytes is tried, every boundary of a page among
them; all of them with HEADWAY_FUZZ=1 (any other number: other bits).
"""

import os
import random
import re
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from small_rollouts import finished, small_rollout

from headway.adapters.journal.sqlite import SqliteJournal
from headway.errors import StorageError
from headway.events import Admitted, Finished, Published, Ready
from headway.protocols import Entry

PAGE = 512
SEGMENT = {"segment_bytes": 900}
SEED = os.environ.get("HEADWAY_FUZZ", "")
EVERY = 1 if SEED else 37
REMEDY = re.compile(r"restore the state directory|choose another|install a newer|start another run")


def open_journal(directory):
    return SqliteJournal(directory, run_id="run-1", **SEGMENT)


def files_of(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def put(directory, files):
    shutil.rmtree(directory, ignore_errors=True)
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)


@pytest.fixture(scope="module")
def directory():
    """A directory that is not kept: in memory where the system has one, since every opening syncs."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name) / "state"


async def write_history(journal):
    """Three groups of two, a commit for each step."""
    events = list(await journal.append([Entry(Published(0.0, 0, ("engine-0",)))]))
    for group in range(3):
        admitted = Entry(Admitted(1.0, group, f"prompt-{group}", 0, 2, 0))
        events += await journal.append([admitted, *(finished(small_rollout(group, member)) for member in range(2))])
        events += await journal.append([Entry(Ready(2.0, group, zero_advantage=False))])
    return events


async def states(directory):
    """The history, and the files as a killed process and as an orderly end leave them."""
    await open_journal(directory).close()
    with closing(sqlite3.connect(directory / "events.sqlite", isolation_level=None)) as connection:
        for statement in ("PRAGMA journal_mode = DELETE", f"PRAGMA page_size = {PAGE}", "VACUUM", "PRAGMA journal_mode = WAL"):
            connection.execute(statement)
    journal = open_journal(directory)
    events = await write_history(journal)
    killed = {name: data for name, data in files_of(directory).items() if not name.name.endswith("-shm")}
    await journal.close()
    return events, {"killed": killed, "ended": files_of(directory)}


def cuts(data):
    """Lengths to cut a file to: near every boundary, and a sample of the rest."""
    boundary = (0, 1, 7, 8, 23, 24, 31, 32, 33, 55, 56, PAGE - 1)
    return [at for at in range(len(data)) if at % EVERY == 0 or at % PAGE in boundary or at % (PAGE + 24) in boundary]


async def recovered(directory):
    """Open what lies there and read all of it; (number of events, the refusal)."""
    try:
        journal = open_journal(directory)
    except StorageError as error:
        return None, str(error)
    try:
        events = list(journal.replay())
        for event in events:
            if isinstance(event, Finished):
                assert await journal.read(event.reference) == small_rollout(event.group, event.member)
    except StorageError as error:
        return None, str(error)
    finally:
        await journal.close()
    return events, ""


async def check(directory, damaged, name, events):
    """A prefix of the history with its rollouts, or a refusal that names the file and the remedy; return how many events are left."""
    put(directory, damaged)
    found, refusal = await recovered(directory)
    if found is None:
        assert name.name.removesuffix("-wal") in refusal
        assert REMEDY.search(refusal)
        return None
    assert found == events[: len(found)]
    return len(found)


@pytest.mark.parametrize("state", ["killed", "ended"])
async def test_files_cut_short_at_every_byte_give_a_prefix_or_are_refused(directory, state):
    shutil.rmtree(directory, ignore_errors=True)
    events, files = await states(directory)
    left = {}
    for name, data in files[state].items():
        left[name.name] = {await check(directory, {**files[state], name: data[:cut]}, name, events) for cut in cuts(data)}
    prefixes = left.pop("events.sqlite-wal", set())
    assert prefixes == (set() if state == "ended" else {0, 1, 4, 5, 8, 9, 12})  # whole commits, and none refused
    assert left == {"events.sqlite": left["events.sqlite"], "000001.rollouts": {None}, "000002.rollouts": {None}}
    assert left["events.sqlite"] in ({None}, {None, 13})  # 13: all of it lay in the write-ahead log as well


@pytest.mark.parametrize("state", ["killed", "ended"])
async def test_a_bit_flipped_in_any_byte_gives_a_prefix_or_is_refused(directory, state):
    shutil.rmtree(directory, ignore_errors=True)
    events, files = await states(directory)
    rng = random.Random(f"{state} {SEED}")
    for name, data in files[state].items():
        refused = 0
        for at in cuts(data):
            changed = bytearray(data)
            changed[at] ^= 1 << rng.randrange(8)
            refused += await check(directory, {**files[state], name: bytes(changed)}, name, events) is None
        if name.suffix == ".rollouts":
            assert refused == len(cuts(data))


@pytest.mark.parametrize("events_left", [0, 5, 12])
async def test_a_recovered_prefix_is_gone_on_from(directory, events_left):
    shutil.rmtree(directory, ignore_errors=True)
    events, files = await states(directory)
    wal = Path("events.sqlite-wal")
    for cut in range(32, len(files["killed"][wal]) + 1, PAGE + 24):  # whole frames
        put(directory, {**files["killed"], wal: files["killed"][wal][:cut]})
        journal = open_journal(directory)
        found = list(journal.replay())
        if len(found) == events_left:
            break
        await journal.close()
    found += await journal.append([finished(small_rollout(7))])
    await journal.close()
    assert (await recovered_with(directory, 7)) == found
    assert found[:-1] == events[:events_left]


async def recovered_with(directory, group):
    journal = open_journal(directory)
    events = list(journal.replay())
    assert await journal.read(events[-1].reference) == small_rollout(group)
    await journal.close()
    return events


async def test_a_process_killed_while_the_journal_begins_leaves_nothing_in_the_way(directory):
    shutil.rmtree(directory, ignore_errors=True)
    await open_journal(directory).close()
    whole = (directory / "events.sqlite").read_bytes()
    for cut in (0, 1, 100, PAGE, len(whole) - 1, len(whole)):
        put(directory, {Path(".tmp-events.sqlite-0123abcd"): whole[:cut], Path(".tmp-events.sqlite-0123abcd-journal"): whole[:cut]})
        journal = open_journal(directory)
        assert list(journal.replay()) == []
        await journal.close()
        assert not list(directory.glob(".tmp-*"))


async def test_a_journal_whose_events_are_lost_is_not_begun_anew_beside_its_segments(directory):
    shutil.rmtree(directory, ignore_errors=True)
    journal = open_journal(directory)
    await journal.append([finished(small_rollout(1))])
    await journal.close()
    (directory / "events.sqlite").unlink()
    before = files_of(directory)
    with pytest.raises(StorageError, match=r"events\.sqlite: is damaged: it is missing, and there are segments .* restore"):
        open_journal(directory)
    assert files_of(directory) == before
