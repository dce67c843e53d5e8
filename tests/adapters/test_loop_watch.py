"""The loop is watched from outside: its lag is measured, and a line that blocks it is named while it does."""

import asyncio
import math
import re
import threading
import time
from itertools import pairwise

from headway.adapters.loop_watch import BEAT_SECONDS, LoopWatch, stack_of

NAMED = "in blocks_until: event.wait(120.0)"


class Told:
    """What a watch says; `said` once it has said so of the line below, and not of a loop that the machine has held up elsewhere."""

    def __init__(self):
        self.texts = []
        self.said = threading.Event()

    def __call__(self, text):
        self.texts.append(text)
        if NAMED in text:
            self.said.set()

    @property
    def named(self):
        return [text for text in self.texts if NAMED in text]


def blocks_until(event):
    event.wait(120.0)  # the line that is to be named


async def while_watched(watch, work):
    watching = asyncio.create_task(watch.run())
    await asyncio.sleep(0)  # it is watched from here on
    try:
        return await work()
    finally:
        watching.cancel()


def test_C10_the_line_that_blocks_the_loop_is_named_while_it_blocks():
    told = Told()
    watch = LoopWatch(report=told, blocked_seconds=0.2)

    async def work():
        blocks_until(told.said)

    asyncio.run(while_watched(watch, work))
    first, *stack = told.named[0].splitlines()
    assert re.match(r"the event loop has not turned for \d+ s: it is blocked at ", first)
    assert any(NAMED in line for line in stack)
    assert not any("run_until_complete" in line or "runners.py" in line for line in stack)


def test_it_is_said_again_at_growing_distances_and_acted_on_once_it_has_lasted_too_long():
    told, stuck = Told(), Told()
    watch = LoopWatch(report=told, stuck=stuck, stuck_seconds=0.9, blocked_seconds=0.1)

    async def work():
        blocks_until(stuck.said)

    started = time.monotonic()
    asyncio.run(while_watched(watch, work))
    lasted = time.monotonic() - started
    assert lasted >= 0.9
    assert 1 <= len(told.named) <= math.log2(lasted / 0.1) + 1  # after .1, .2, .4, .8 s, and so on: fewer, where looks come late
    assert len(stuck.texts) == 1


def test_a_loop_that_turns_is_never_reported_however_long_its_calls_take():
    told, turns = Told(), [time.monotonic()]
    watch = LoopWatch(report=told, stuck=told, stuck_seconds=1.0, blocked_seconds=1.0)

    async def turn():
        while True:
            await asyncio.sleep(0.01)
            turns.append(time.monotonic())

    async def work():
        turning = asyncio.create_task(turn())
        await asyncio.sleep(1.5)
        turning.cancel()

    asyncio.run(while_watched(watch, work))
    turns.append(time.monotonic())
    stood_still = max(after - before for before, after in pairwise(turns)) > 0.8  # the machine's doing, and no call's
    assert told.texts == [] or stood_still
    assert watch.blocked_at() == ""


def test_the_lag_is_that_since_it_was_asked_for_last():
    watch = LoopWatch(report=lambda _: None)
    blocked = threading.Event()

    async def work():
        watch.lag()
        assert watch.lag() == (0.0, 0.0)
        blocked.wait(0.3)
        await asyncio.sleep(2 * BEAT_SECONDS)
        return watch.lag(), watch.lag()

    (p99, longest), after = asyncio.run(while_watched(watch, work))
    assert 0.2 < p99 <= longest
    assert after == (0.0, 0.0)


def test_a_thread_that_has_ended_has_no_stack():
    thread = threading.Thread(target=lambda: None)
    thread.start()
    number = thread.ident
    thread.join()
    assert stack_of(number or 0) == []
