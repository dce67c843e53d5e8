"""The keeper: what is no longer needed goes after each trained batch, and the gate is closed while there is no room."""

import asyncio
import logging

from doubles import Spine, beside, prompt, turns

from headway.errors import StorageError
from headway.events import Admitted, BatchFormed, Ready
from headway.flow.gate import CapacityGate
from headway.flow.keeper import Keeper
from headway.rules.admission import GateLimits


class Disk:
    """So many bytes free, as the test says; what was removed."""

    def __init__(self, free=10**9):
        self.free = free
        self.written = asyncio.Event()
        self.written.set()
        self.needed = []
        self.retired = []

    async def free_space(self):
        if self.free is None:
            raise StorageError("/run: does not say how much is free")
        return self.free, "/run"

    async def flush(self):
        await self.written.wait()

    async def prune(self, needed):
        self.needed.append(set(needed))

    async def retire(self, before):
        self.retired.append(before)


def keeper(spine, disk, *, keep_payloads=2, keep_batches=0, heed_space=lambda _: None, min_free_bytes=100):
    return Keeper(
        watch=spine.watch,
        prune=disk.prune,
        retire=disk.retire,
        flush=disk.flush,
        free_space=disk.free_space,
        heed_space=heed_space,
        keep_payloads=keep_payloads,
        keep_batches=keep_batches,
        min_free_bytes=min_free_bytes,
    )


def form(spine):
    """Let the next batch be formed, of a group of its number."""
    k = spine.ledger.next_batch
    spine.record(Admitted(0.0, k, f"p{k}", 0, 1, max(0, spine.ledger.version)))
    spine.record(Ready(0.0, k, zero_advantage=False))
    spine.record(BatchFormed(0.0, k, (k,), 0.0))


async def test_after_each_trained_batch_the_journal_may_forget_what_is_older_than_asked_for():
    spine, disk = Spine(), Disk()
    async with beside(keeper(spine, disk).run()):
        await turns()
        for k in range(4):
            form(spine)
            await turns()
            assert len(disk.needed) == k + 1  # a batch that is formed makes nothing unneeded
            spine.acknowledge(k)
            await turns()
    assert disk.needed == [set(), {0}, {0, 1}, {1, 2}, {2, 3}]
    assert disk.retired == []


async def test_a_run_that_keeps_many_payloads_looks_for_what_it_may_remove_a_few_times_in_as_many_batches():
    """A look costs as much as there is kept: one for each batch of a run that keeps 10,000 stopped the loop for .3 s each time."""
    spine, disk = Spine(), Disk()
    async with beside(keeper(spine, disk, keep_payloads=64).run()):
        for k in range(200):
            form(spine)
            spine.acknowledge(k)
            await turns()
    assert [max(needed) for needed in disk.needed] == list(range(2, 200, 4))
    assert [min(needed) for needed in disk.needed][16:] == list(range(3, 136, 4)), "the last 64 are always among them"


async def test_nothing_is_removed_before_what_made_it_unneeded_is_durable():
    """Whoever takes the run up after a crash knows of no drop that was not written, and needs the rollouts."""
    spine, disk = Spine(), Disk()
    form(spine)
    disk.written.clear()
    async with beside(keeper(spine, disk, keep_batches=1).run()):
        spine.acknowledge(0)
        await turns()
        assert (disk.needed, disk.retired) == ([], [])
        disk.written.set()
        await turns()
    assert disk.needed == [{0}]


async def test_batch_directories_are_retired_beyond_as_many_as_asked_for_and_only_trained_ones():
    spine, disk = Spine(), Disk()
    async with beside(keeper(spine, disk, keep_batches=2).run()):
        for k in range(5):
            form(spine)
            form(spine) if k == 4 else None
            spine.acknowledge(k)
            await turns()
    assert disk.retired == [1, 2, 3]


async def test_without_room_no_group_starts_and_with_room_it_goes_on_by_itself(caplog):
    caplog.set_level(logging.INFO, "headway")
    spine, disk = Spine(), Disk(free=99)
    limits = GateLimits(groups_per_batch=1, group_size=1, max_concurrent=9, steps_ahead=3.0, steps=10)
    gate = CapacityGate(limits, watch=spine.watch, record=spine.record, clock=spine.clock)
    kept = keeper(spine, disk, heed_space=gate.heed_space)
    async with beside(kept.watch_space()):
        await turns()
        waiting = asyncio.ensure_future(gate.admit(prompt()))
        await asyncio.sleep(5)
        assert (waiting.done(), gate.capacity, gate.reason, kept.free_bytes) == (False, 0, "disk", 99)
        assert gate.try_admit_replayed("x", "replay", 1) is None
        disk.free = 105  # not enough to spare yet
        await asyncio.sleep(5)
        assert not waiting.done()
        disk.free = 200
        assert (await waiting).group == 0
        assert gate.reason == "open"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith("/run: 0 MB free, run.min_free_bytes asks for 0 MB: no further group starts until there is room. Remove")
    assert said[1] == "/run: 0 MB free: groups start again"


async def test_a_drain_does_not_wait_for_room():
    spine, disk = Spine(), Disk(free=0)
    gate = CapacityGate(
        GateLimits(groups_per_batch=1, group_size=1, max_concurrent=9, steps_ahead=3.0, steps=10),
        watch=spine.watch,
        record=spine.record,
        clock=spine.clock,
    )
    async with beside(keeper(spine, disk, heed_space=gate.heed_space).watch_space()):
        await turns()
        waiting = asyncio.ensure_future(gate.admit(prompt()))
        await turns()
        spine.drain()
        assert await waiting is None
        assert gate.reason == "draining"


async def test_a_disk_that_does_not_answer_is_told_of_once_and_asked_again(caplog):
    disk, heeded = Disk(free=99), []
    kept = keeper(Spine(), disk, heed_space=heeded.append)
    async with beside(kept.watch_space()):
        await asyncio.sleep(5)
        disk.free = None
        await asyncio.sleep(5)
        assert (kept.free_bytes, heeded) == (None, [True]), "what it said last goes on to hold"
        disk.free = 200
        await asyncio.sleep(5)
        disk.free = None
        await asyncio.sleep(5)
    assert heeded == [True, False]
    assert [record.getMessage() for record in caplog.records if "does not say" in record.getMessage()] == [
        "/run: does not say how much is free; it is asked again"
    ] * 2
