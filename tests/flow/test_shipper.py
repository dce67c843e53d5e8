"""The shipper: written before announced, in order, and an error is no end of the input."""

import pytest
from doubles import beside, filled, together, turns

from headway.errors import BoundBreached, StorageError
from headway.flow.channels import Channel
from headway.flow.shipper import Shipper
from headway.types import Batch


def batch(k):
    return Batch(k, (), 1, "mask", 1.0)


async def shipper(log, *batches, rows, fails=None, again=()):
    async def write(one):
        await turns(5 - one.k)  # the first takes longest
        if one.k == fails:
            raise StorageError("the disk is full")
        log.append(("written", one.k))
        return {"batch": one.k}

    async def submit(k):
        log.append(("announced", k))

    return Shipper(batches=await filled(*batches), rows=rows, write=write, submit=submit, shipped_again=again)


async def test_each_batch_is_written_before_it_is_announced_and_all_in_order():
    log, rows = [], Channel(9)
    await (await shipper(log, batch(0), batch(1), batch(2), rows=rows)).run()
    assert log == [(what, k) for k in range(3) for what in ("written", "announced")]
    assert [row async for row in rows] == [(k, {"batch": k}) for k in range(3)]


async def test_a_batch_that_cannot_be_written_is_not_announced_and_the_rows_do_not_end_as_if_all_were_well():
    log, rows = [], Channel(9)
    it = await shipper(log, batch(0), batch(1), rows=rows, fails=1)
    with pytest.raises(StorageError):
        await together(it.run())
    assert log == [("written", 0), ("announced", 0)]
    await rows.send(None)  # an open channel takes it


async def test_rows_that_nobody_reads_hold_the_shipper_back():
    log, rows = [], Channel(1)
    async with beside((await shipper(log, *map(batch, range(4)), rows=rows)).run()):
        await turns(100)
        assert log[-1] == ("announced", 1)


@pytest.mark.parametrize("second", [3, 5])
async def test_a_batch_out_of_turn_is_a_breach_and_is_not_even_written(second):
    log = []
    with pytest.raises(BoundBreached, match=f"batch {second} is to be shipped where batch 4 comes next"):
        await together((await shipper(log, batch(3), batch(second), rows=Channel(9))).run())
    assert log == [("written", 3), ("announced", 3)]


async def test_batches_that_lie_persisted_are_announced_again_first_with_their_rows_and_not_written_again():
    log, rows = [], Channel(9)
    again = [(3, {"batch": 3, "from": "disk"}), (4, {"batch": 4, "from": "disk"})]
    await (await shipper(log, batch(5), rows=rows, again=again)).run()
    assert log == [("announced", 3), ("announced", 4), ("written", 5), ("announced", 5)]
    assert [row async for row in rows] == [*again, (5, {"batch": 5})]


@pytest.mark.parametrize(("again", "first"), [((3, 4), 4), ((3, 4), 6), ((3, 5), 6), ((4, 3), 5)])
async def test_what_is_announced_again_is_in_turn_with_what_comes_after_it(again, first):
    log = []
    with pytest.raises(BoundBreached, match="is to be shipped where batch"):
        await together((await shipper(log, batch(first), rows=Channel(9), again=[(k, {}) for k in again])).run())
    assert ("written", first) not in log
