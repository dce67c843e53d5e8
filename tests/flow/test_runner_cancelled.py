"""Its deadline makes a failure of a rollout; anybody else ends its task, also where both happen. And what is said of failures."""

import asyncio
import logging

import pytest
from doubles import beside, failure, turns
from scripted_runner import Script, go, runner, stuck


async def cleans_up(request, move=None):
    try:
        await stuck(request)
    finally:
        await asyncio.sleep(50)


@pytest.mark.parametrize("outside", [5.0, 20.0], ids=["before the deadline", "after it"])
async def test_who_is_cancelled_from_outside_while_it_cleans_up_is_cancelled_and_has_not_timed_out(outside):
    """The run ends: nothing of the rollout is recorded any more, and its task does not go on to another attempt."""
    it = runner(cleans_up, timeout_seconds=10.0)
    async with beside(it.sweep()):
        going = asyncio.ensure_future(go(it, on_retry=pytest.fail))
        asyncio.get_running_loop().call_at(outside, going.cancel)
        with pytest.raises(asyncio.CancelledError):
            await going
        assert asyncio.get_running_loop().time() == max(outside, 10.0), "the second cancellation ends what the first has begun"
        assert it.pool.load == {"sim://a": 0, "sim://b": 0}


async def test_a_failure_is_told_once_for_its_kind_and_not_for_every_attempt(caplog):
    it = runner(Script(failure(detail="disk\nfull"), failure(detail="disk\nbroken"), failure(detail="network")), max_attempts=3)
    with caplog.at_level(logging.INFO, "headway.flow.runner"):
        assert (await go(it)).detail == "network"
        await turns()
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"an attempt failed by environment_error: {what} (others that fail alike are only counted)" for what in ("disk", "network")
    ]


async def test_of_failures_that_are_all_different_only_the_first_are_told(caplog):
    it = runner(Script(*(failure(detail=f"request {number}") for number in range(50))), max_attempts=50)
    with caplog.at_level(logging.INFO, "headway.flow.runner"):
        await go(it)
    assert len(caplog.records) == 20
