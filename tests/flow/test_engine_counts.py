"""Engines' own counters, added up from the start of a run."""

import asyncio

from headway.errors import EngineFailed
from headway.flow.engine_counts import EngineCounts


class Counter:
    def __init__(self, *counts):
        self.counts = list(counts)

    async def sampled_tokens(self):
        count = self.counts.pop(0)
        if isinstance(count, Exception):
            raise count
        if count == "hangs":
            await asyncio.sleep(1000)
        return count


async def totals(*engines, times):
    counts = EngineCounts(engines)
    await counts.start()
    return [await counts.total() for _ in range(times)]


async def test_what_was_sampled_before_the_run_is_not_the_runs():
    assert await totals(Counter(100, 130, 150), Counter(0, 5, 5), times=2) == [35, 55]


async def test_from_an_engine_that_was_started_anew_on_the_total_is_unknown():
    assert await totals(Counter(10, 50, 3, 80), Counter(0, 1, 2, 3), times=3) == [41, None, None]


async def test_an_engine_that_fails_or_hangs_makes_one_total_unknown():
    assert await totals(Counter(0, EngineFailed("gone"), "hangs", 9), times=3) == [None, None, 9]


async def test_an_engine_without_a_counter_is_unknown_for_good():
    assert await totals(Counter(None, 4, None), Counter(0, 1, 2), times=2) == [None, None]
