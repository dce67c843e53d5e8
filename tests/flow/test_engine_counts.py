"""Engines' own counters, added up from the start of a run."""

import asyncio

from headway.errors import EngineFailed
from headway.flow.engine_counts import EngineCounts
from headway.sim.engine import SimEngine


class Counter(SimEngine):
    def __init__(self, *counts, name=None):
        super().__init__(name or f"e{id(self)}")
        self.counts = list(counts)

    async def sampled_tokens(self):
        count = self.counts.pop(0)
        if isinstance(count, Exception):
            raise count
        if count == "hangs":
            await asyncio.sleep(1000)
        if isinstance(count, tuple):
            count, seconds = count
            await asyncio.sleep(seconds)
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


async def test_a_slow_answer_costs_one_total_and_at_first_none():
    assert await totals(Counter((100, 8.0), (110, 8.0), 120), times=2) == [None, 20]


async def test_an_engine_without_a_counter_is_unknown_for_good():
    assert await totals(Counter(None, 4, None), Counter(0, 1, 2), times=2) == [None, None]


async def test_an_engine_that_joins_counts_from_where_it_stood_and_one_that_leaves_up_to_its_last_word():
    stays, comes = Counter(0, 10, 20, 30, name="stays"), Counter(500, 505, 507, name="comes")
    counts = EngineCounts([stays])
    await counts.start()
    assert await counts.total() == 10
    counts.joins(comes, await counts.stands(comes))
    assert await counts.total() == 25
    await counts.leaves(comes)
    assert await counts.total() == 37


async def test_what_an_engine_sampled_that_left_without_a_word_nobody_knows():
    stays, gone = Counter(0, 1, 2, name="stays"), Counter(0, EngineFailed("gone"), name="gone")
    counts = EngineCounts([stays, gone])
    await counts.start()
    await counts.leaves(gone)
    assert [await counts.total(), await counts.total()] == [None, None]


async def test_one_that_never_served_leaves_nothing_behind():
    counts = EngineCounts([Counter(0, 4, name="stays")])
    await counts.start()
    await counts.leaves(Counter(name="never"))
    assert await counts.total() == 4
