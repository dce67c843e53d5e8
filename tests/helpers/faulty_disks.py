"""Disks that are full, read-only or broken, for a script in a process of its own: real ones, made by the kernel.

A small disk is a tmpfs that only the script sees (user and mount namespaces). A broken one answers EIO to every fsync and fdatasync,
whoever calls them, SQLite too (a seccomp filter): what is written before them may be on the disk or not, as with a disk that fails.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

_NAMESPACES = ("unshare", "--user", "--map-root-user", "--mount")
_PATHS = os.pathsep.join(str(Path(__file__).parents[1] / name) for name in ("helpers", "adapters"))

# (seccomp, fsync, fdatasync) by machine
_CALLS = {"x86_64": (317, 74, 75), "aarch64": (277, 82, 83)}
_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _ALL_THREADS = 1, 1
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _EIO = 0x7FFF0000, 0x00050005


LIMIT = 600.0  # seconds: a loaded machine imports torch four times within it


@cache
def can_mount() -> bool:
    """Whether this system lets us have a tmpfs of our own."""
    command = [*_NAMESPACES, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def on_small_disk(tmp_path: Path, script: str, *arguments: str, kilobytes: int = 1024) -> str:
    """Run a script with `disk`, the root of a disk of so many kilobytes, and `arguments`; return what it printed. It must succeed."""
    if not can_mount():
        pytest.skip("no user namespaces with mounts here")
    disk = tmp_path / "disk"
    disk.mkdir(exist_ok=True)
    mount = f"mount -t tmpfs -o size={kilobytes}k tmpfs '{disk}' && exec \"$@\""
    return _run([*_NAMESPACES, "sh", "-c", mount, "sh", sys.executable, "-c", PRELUDE + script, str(disk), *arguments])


def on_disk(disk: Path, script: str, *arguments: str) -> str:
    """Run a script with `disk`, an ordinary directory, and `arguments`; return what it printed. It must succeed."""
    return _run([sys.executable, "-c", PRELUDE + script, str(disk), *arguments])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": _PATHS}, check=False, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout


PRELUDE = """
import asyncio, errno, json, os, subprocess, sys
from pathlib import Path
from faulty_disks import break_the_disk, fill, remount
from small_rollouts import finished, small_batch, small_rollout
from headway.errors import ConfigError, StorageError
disk, arguments = Path(sys.argv[1]), sys.argv[2:]
"""


def fill(disk: Path, leave: int = 0) -> Path:
    """Fill a disk but for so many bytes; return the file to remove when there shall be room again."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 4096) == 4096:
                pass
        except OSError:
            pass
        file.truncate(max(0, file.tell() - leave))
    return ballast


def remount(disk: Path, how: str) -> None:
    """Make a small disk read-only ("ro"), or writable again ("rw")."""
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


def can_break() -> bool:
    """Whether `break_the_disk` knows this machine."""
    return sys.platform == "linux" and platform.machine() in _CALLS


def break_the_disk() -> None:
    """From now on every fsync and fdatasync of this process fails with EIO."""
    seccomp, *syncs = _CALLS[platform.machine()]
    program = struct.pack("<HBBI", _LOAD, 0, 0, 0)  # the number of the call
    for position, number in enumerate(syncs):
        program += struct.pack("<HBBI", _JUMP_IF_EQUAL, len(syncs) - position, 0, number)
    program += struct.pack("<HBBI", _RETURN, 0, 0, _ALLOW) + struct.pack("<HBBI", _RETURN, 0, 0, _EIO)
    libc = ctypes.CDLL(None, use_errno=True)
    instructions = ctypes.create_string_buffer(program)
    header = ctypes.create_string_buffer(struct.pack("@HxxxxxxP", len(program) // 8, ctypes.addressof(instructions)))
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.syscall(seccomp, _SET_MODE_FILTER, _ALL_THREADS, header):
        raise OSError(ctypes.get_errno(), "seccomp")
