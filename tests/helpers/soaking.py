"""What a long run needs that is watched for what it leaves behind: a simulated journal on a real disk, and a trend through samples."""

import asyncio
import gc
import os
from pathlib import Path

from headway.events import BatchAcknowledged
from headway.formats.events import decode_event, encode_event
from headway.sim.journal import SimJournal

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_megabytes(pid="self"):
    """Memory of a process, as the kernel counts it."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / 1e6


def slope(samples):
    """The least-squares slope through (x, y) samples."""
    n = len(samples)
    x_mean, y_mean = sum(x for x, _ in samples) / n, sum(y for _, y in samples) / n
    return sum((x - x_mean) * (y - y_mean) for x, y in samples) / sum((x - x_mean) ** 2 for x, _ in samples)


class DiskJournal(SimJournal):
    """A simulated journal whose events lie in a file. It takes a sample after every so many acknowledged batches.

    `samples`: (batches, megabytes resident, objects that the collector knows, tasks).
    """

    def __init__(self, path, *, every, commit_seconds=0.0):
        super().__init__(commit_seconds=commit_seconds)
        self._file = path.open("w+b")
        self._every = every
        self._next = every
        self.batches = 0
        self.samples = []

    async def append(self, entries):
        written = await super().append(entries)
        self._file.write(b"".join(encode_event(event) + b"\n" for event in written))
        self.events.clear()
        self.batches = max([self.batches, *(event.k + 1 for event in written if isinstance(event, BatchAcknowledged))])
        if self.batches >= self._next:
            self._next += self._every
            gc.collect()
            self.samples.append((self.batches, resident_megabytes(), len(gc.get_objects()), len(asyncio.all_tasks())))
        return written

    def shut(self):
        """Close the file, at the end of all lives."""
        self._file.close()

    def replay(self):
        self._file.flush()
        with Path(self._file.name).open("rb") as lines:
            yield from map(decode_event, lines)
