"""Holds on published directories, across processes."""

import subprocess
import sys
import threading

import pytest

from headway.errors import StorageError
from headway.formats.hold import Hold, alone, is_held, unheld
from headway.formats.manifest import write_manifest

HOLDER = """
import sys
from pathlib import Path
from headway.formats.hold import Hold
hold = Hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""

ALONE = """
import sys
from pathlib import Path
from headway.formats.hold import alone
with alone(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def published(tmp_path):
    directory = tmp_path / "00000001"
    directory.mkdir()
    (directory / "file").write_bytes(b"x")
    write_manifest(directory, kind="weights", lineage="abc", id=1)
    return directory


def test_a_directory_is_held_until_its_holder_lets_go(tmp_path):
    directory = published(tmp_path)
    hold = Hold(directory)
    assert is_held(directory)
    hold.release()
    hold.release()
    assert not is_held(directory)


def test_two_may_hold_one_directory(tmp_path):
    directory = published(tmp_path)
    first, second = Hold(directory), Hold(directory)
    first.release()
    assert is_held(directory)
    second.release()
    assert not is_held(directory)


def test_a_killed_holder_holds_nothing(tmp_path):
    directory = published(tmp_path)
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        assert is_held(directory)
        holder.kill()
    assert not is_held(directory)


def test_who_removes_a_directory_has_it_alone_until_it_is_gone(tmp_path):
    directory = published(tmp_path)
    with unheld(directory) as free:
        assert free
        Hold(directory)
        (directory / "manifest.json").unlink()
        Hold(directory)
    assert not is_held(directory)


def test_a_directory_that_is_held_stays_held_while_somebody_looks(tmp_path):
    directory = published(tmp_path)
    hold = Hold(directory)
    with unheld(directory) as free:
        assert not free
    hold.release()
    with unheld(directory) as free:
        assert free


def test_who_only_asks_keeps_nobody_from_holding(tmp_path):
    directory = published(tmp_path)
    over = threading.Event()

    def ask():
        while not over.is_set():
            is_held(directory)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(200):
            hold = Hold(directory)
            assert is_held(directory)
            hold.release()
    finally:
        over.set()
        asking.join()


def test_a_directory_without_a_manifest_needs_no_hold(tmp_path):
    Hold(tmp_path).release()
    assert not is_held(tmp_path)


def test_one_at_a_time_holds_a_lock_and_the_next_has_it_when_that_one_has_ended(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", ALONE, str(tmp_path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(StorageError, match=r"another process holds it, for 0\.1 s by now"), alone(tmp_path / "lock", seconds=0.1):
        raise AssertionError("two are alone")
    with alone(tmp_path / "lock", seconds=60, stopped=lambda: True) as had:
        assert not had
    threading.Timer(0.2, holder.kill).start()
    with alone(tmp_path / "lock", seconds=60) as had:
        assert had
    holder.communicate()


def test_a_lock_that_cannot_be_opened_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match="cannot be opened: No such file"), alone(tmp_path / "none" / "lock"):
        pass
