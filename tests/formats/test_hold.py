"""Holds on published directories, across processes."""

import subprocess
import sys

from headway.formats.hold import Hold, is_held
from headway.formats.manifest import write_manifest

HOLDER = """
import sys
from pathlib import Path
from headway.formats.hold import Hold
hold = Hold(Path(sys.argv[1]))
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


def test_a_directory_without_a_manifest_needs_no_hold(tmp_path):
    Hold(tmp_path).release()
    assert not is_held(tmp_path)
