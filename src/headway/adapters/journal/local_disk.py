"""Whether a directory lies on a local disk: SQLite's write-ahead log and file locks cannot be relied on over a network."""

from __future__ import annotations

import os
import re
from pathlib import Path

from headway.errors import ConfigError

MOUNTS = Path("/proc/self/mountinfo")
_KERNEL = (
    "nfs nfs3 nfs4 cifs smb2 smb3 smbfs ncpfs afs coda 9p ceph glusterfs lustre lustre_lite beegfs fhgfs gpfs mmfs pvfs2 orangefs panfs dvs"
)
_FUSE = (  # most of them as "fuse.<name>"
    "alluxio-fuse blobfuse blobfuse2 ceph-fuse davfs davfs2 dfuse gcsfuse goofys hdfs fuse_dfs juicefs lizardfs mfs moosefs mount-s3 "
    "mountpoint-s3 objectivefs prl_fs quobyte rclone s3backer s3fs seaweedfs sshfs vboxsf vmhgfs vmhgfs-fuse wekafs weka"
)
_OCTAL = re.compile(r"\\([0-7]{3})")
_NETWORK = frozenset(f"{_KERNEL} {_FUSE}".casefold().split())


def file_system(path: Path, mounts: str) -> str:
    """Return the type of the file system that an absolute path lies on; `mounts` has the form of /proc/self/mountinfo."""
    best, kind = -1, ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        point = Path(_OCTAL.sub(lambda code: chr(int(code[1], 8)), before.split(" ")[4]))  # spaces are written \040
        if path.is_relative_to(point) and len(point.parts) >= best:  # a later mount covers an earlier one
            best, kind = len(point.parts), after.split(" ")[0]
    return kind


def is_network(kind: str) -> bool:
    """Whether a type of file system, as the mount table names it, lies elsewhere: over a network, or with the host of a virtual machine."""
    return kind.casefold().removeprefix("fuse.").partition("#")[0] in _NETWORK


def refuse_network_file_system(directory: Path, table: Path = MOUNTS) -> None:
    """Raise ConfigError when an existing directory lies on a network file system. Knows Linux; elsewhere nothing is refused."""
    try:
        mounts = os.fsdecode(table.read_bytes())
    except OSError:
        return
    kind = file_system(directory.resolve(), mounts)
    if is_network(kind):
        raise ConfigError(f"{directory}: lies on a network file system ({kind}): set run.state_directory to a directory on a local disk")
