"""Whether a directory lies on a local disk: SQLite's write-ahead log and file locks cannot be relied on over a network."""

from __future__ import annotations

from pathlib import Path

from headway.errors import ConfigError

_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre", "beegfs", "gpfs", "pvfs2", "orangefs", "wekafs"}
_NETWORK |= {"sshfs", "gcsfuse", "s3fs", "goofys", "juicefs", "rclone", "vboxsf"}  # most of them as "fuse.<name>"


def file_system(path: Path, mounts: str) -> str:
    """Return the type of the file system that an absolute path lies on; `mounts` has the form of /proc/self/mountinfo."""
    best, kind = -1, ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        point = Path(before.split(" ")[4].encode().decode("unicode_escape"))  # spaces are written \040
        if path.is_relative_to(point) and len(point.parts) >= best:  # a later mount covers an earlier one
            best, kind = len(point.parts), after.split(" ")[0]
    return kind


def refuse_network_file_system(directory: Path) -> None:
    """Raise ConfigError when an existing directory lies on a network file system. Knows Linux; elsewhere nothing is refused."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text()
    except OSError:
        return
    kind = file_system(directory.resolve(), mounts)
    if kind.removeprefix("fuse.") in _NETWORK:
        raise ConfigError(f"{directory}: lies on a network file system ({kind}): set run.state_directory to a directory on a local disk")
