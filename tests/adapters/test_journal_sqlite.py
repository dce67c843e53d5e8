import asyncio
import resource
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import small_rollouts
from small_rollouts import finished, small_rollout

from headway.adapters.journal.local_disk import file_system, is_network, refuse_network_file_system
from headway.adapters.journal.sqlite import SqliteJournal
from headway.errors import ConfigError, StorageError
from headway.events import Admitted, Published
from headway.protocols import Entry


def admitted(group, time=1.0):
    return Entry(Admitted(time, group, f"prompt-{group}", 0, 8, 0))


@pytest.fixture
async def opened(tmp_path):
    """Open the journal of a test; every one is closed at its end."""
    alive = []

    def open_journal(run_id="run-1", **options):
        alive.append(SqliteJournal(tmp_path / "state", run_id=run_id, **options))
        return alive[-1]

    yield open_journal
    for journal in alive:
        await journal.close()


async def test_history_and_rollouts_survive_a_reopening_in_order(opened):
    journal = opened()
    rollouts = [small_rollout(1, member) for member in range(3)]
    written = list(await journal.append([admitted(1), *map(finished, rollouts)]))
    written += await journal.append([Entry(Published(2.0, 1, ("engine-0",)))])
    assert [event.reference is not None for event in written[1:4]] == [True] * 3
    await journal.close()
    await journal.close()
    again = opened()
    assert list(again.replay()) == written
    written += await again.append([finished(small_rollout(2))])
    assert list(again.replay()) == written
    assert [await again.read(event.reference) for event in written[1:4]] == rollouts
    assert (await again.read(written[-1].reference)).group == 2


async def test_appends_from_many_tasks_keep_their_order_and_their_rollouts(opened):
    journal = opened(segment_bytes=2000)
    written = await asyncio.gather(*(journal.append([admitted(i), finished(small_rollout(i))]) for i in range(50)))
    assert list(journal.replay()) == [event for events in written for event in events]
    for i, (_, event) in enumerate(written):
        assert await journal.read(event.reference) == small_rollout(i)


async def test_another_runs_journal_is_refused(opened):
    await opened().close()
    with pytest.raises(StorageError, match=r"belongs to run run-1, not to run-2: choose another run\.state_directory"):
        opened("run-2")


async def test_a_foreign_or_garbled_file_is_refused_and_left_alone(opened, tmp_path):
    path = tmp_path / "state" / "events.sqlite"
    path.parent.mkdir()
    path.write_bytes(b"no database" * 100)
    with pytest.raises(StorageError, match=r"events\.sqlite: cannot be opened: .* it is damaged, or no journal: restore"):
        opened()
    assert path.read_bytes() == b"no database" * 100
    path.unlink()
    foreign = sqlite3.connect(path)
    foreign.execute("CREATE TABLE notes (text)")
    foreign.close()
    with pytest.raises(StorageError, match="SQLite file of something else"):
        opened()


async def change(opened, tmp_path, *statements):
    """Fill a journal, change it behind its back."""
    journal = opened()
    await journal.append([admitted(1), admitted(2), finished(small_rollout(1)), admitted(3)])
    await journal.close()
    connection = sqlite3.connect(tmp_path / "state" / "events.sqlite")
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE header SET value = '2' WHERE key = 'schema_version'", "install a newer headway"),
        ("DELETE FROM header WHERE key = 'run_id'", "its header is incomplete"),
        ("DELETE FROM events WHERE sequence = 2", "event 2 is missing"),
        ("UPDATE events SET event = replace(event, 'prompt-3', 'prompt-4')", "event 4 does not match its checksum"),
        ("DROP TABLE events", "cannot be read: no such table: events: it is damaged"),
    ],
)
async def test_a_newer_or_damaged_journal_is_refused_at_the_opening(opened, tmp_path, statement, message):
    await change(opened, tmp_path, statement)
    with pytest.raises(StorageError, match=message):
        opened()


async def test_an_event_that_changes_while_the_journal_is_open_is_refused_when_it_is_replayed(opened, tmp_path):
    journal = opened()
    await journal.append([admitted(1), admitted(2)])
    with sqlite3.connect(tmp_path / "state" / "events.sqlite") as connection:
        connection.execute("UPDATE events SET event = replace(event, 'prompt-1', 'prompt-9')")
    connection.close()
    with pytest.raises(StorageError, match=r"event 1 does not match its checksum: restore"):
        list(journal.replay())


async def test_a_database_cut_short_is_refused(opened, tmp_path):
    journal = opened()
    await journal.append([admitted(i) for i in range(500)])
    await journal.close()
    path = tmp_path / "state" / "events.sqlite"
    whole = path.read_bytes()
    for pages in range(1, len(whole) // 4096):
        path.write_bytes(whole[: pages * 4096])
        with pytest.raises(StorageError, match=r"events\.sqlite"):
            list(opened().replay())


async def test_a_flipped_byte_in_a_payload_is_refused_and_other_rollouts_are_read(opened, tmp_path):
    journal = opened()
    first, second = await journal.append([finished(small_rollout(1)), finished(small_rollout(2))])
    await journal.close()
    path = tmp_path / "state" / "segments" / "000001.rollouts"
    data = bytearray(path.read_bytes())
    data[first.reference.offset + 60] ^= 1
    path.write_bytes(data)
    again = opened()
    with pytest.raises(StorageError, match="does not match its checksum"):
        await again.read(first.reference)
    assert await again.read(second.reference) == small_rollout(2)


async def test_a_record_whose_event_was_never_committed_is_cut_away(opened, tmp_path):
    journal = opened()
    (kept,) = await journal.append([finished(small_rollout(1))])
    await journal.close()
    path = tmp_path / "state" / "segments" / "000001.rollouts"
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"half a record")
    again = opened()
    assert path.stat().st_size == size
    assert await again.read(kept.reference) == small_rollout(1)


async def test_a_write_that_failed_is_final_and_names_the_remedy(opened, tmp_path):
    journal = opened()
    written = list(await journal.append([finished(small_rollout(1))]))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limit[1]))
    try:
        with pytest.raises(StorageError, match="cannot be written: File too large"):
            await journal.append([admitted(2), finished(small_rollout(2, tokens=50_000))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    with pytest.raises(StorageError, match="File too large"):
        await journal.append([admitted(3)])
    await journal.close()
    again = opened()
    assert list(again.replay()) == written
    assert await again.read(written[0].reference) == small_rollout(1)


def kill_after(number, command):
    """Kill a process once it has printed a number; return the last number that it printed whole."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        seen = [int(next(writer.stdout)) for _ in range(number + 1)]
        writer.kill()
        rest = writer.stdout.read()
    return [*seen, *map(int, rest[: rest.rfind("\n") + 1].split())][-1]


@pytest.mark.e2e
async def test_what_append_returned_survives_a_killed_process(opened, tmp_path):
    script = """
import asyncio, pathlib, sys
sys.path.insert(0, sys.argv[2])
from small_rollouts import finished, small_rollout
from headway.adapters.journal.sqlite import SqliteJournal
async def main():
    journal = SqliteJournal(pathlib.Path(sys.argv[1]), run_id="run-1", segment_bytes=20_000)
    for i in range(100_000):
        await journal.append([finished(small_rollout(i, tokens=100))])
        print(i, flush=True)
asyncio.run(main())
"""
    command = [sys.executable, "-c", script, str(tmp_path / "state"), str(Path(small_rollouts.__file__).parent)]
    acknowledged = await asyncio.to_thread(kill_after, 60, command)
    journal = opened()
    events = list(journal.replay())
    assert len(events) > acknowledged
    for i, event in enumerate(events):
        assert await journal.read(event.reference) == small_rollout(i, tokens=100)


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:35 / /home rw shared:9 - nfs4 server:/home rw
41 40 0:36 / /home/my\\040data rw - fuse.sshfs host:/data rw
42 40 8:2 / /home/scratch rw - xfs /dev/sdb1 rw
43 40 0:37 / /home/süß rw - lustre mds:/work rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/run", "ext4"),
        ("/home/me/state", "nfs4"),
        ("/home/my data/state", "fuse.sshfs"),
        ("/home/scratch/state", "xfs"),
        ("/home/süß/state", "lustre"),
        ("/homes", "ext4"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_its_nearest_mount(tmp_path, path, kind):
    assert file_system(type(tmp_path)(path), MOUNTS) == kind


@pytest.mark.parametrize(
    "kind", ["nfs4", "cifs", "lustre", "beegfs", "gpfs", "ceph", "fuse.ceph-fuse", "fuse.sshfs", "wekafs", "9p", "fuse.JuiceFS"]
)
def test_network_file_systems_are_known(kind):
    assert is_network(kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "apfs", "f2fs", "virtiofs", "fuse.fuse-overlayfs", ""])
def test_local_file_systems_are_left_alone(kind):
    assert not is_network(kind)


def test_a_directory_on_a_network_file_system_is_refused_with_the_remedy(tmp_path):
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS + f"43 22 0:37 / {tmp_path} rw - nfs4 server:/runs rw\n")
    state = tmp_path / "state"
    with pytest.raises(
        ConfigError, match=r"state: lies on a network file system \(nfs4\): set run\.state_directory to a directory on a local"
    ):
        refuse_network_file_system(state, table)
    refuse_network_file_system(state, tmp_path / "no mount table here")
