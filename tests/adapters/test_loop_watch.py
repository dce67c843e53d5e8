"""The loop is watched from outside: its lag is measured, and a line that blocks it is named while it does."""

import asyncio
import threading
import time

from headway.adapters.loop_watch import BEAT_SECONDS, LoopWatch, stack_of


class Told:
    """What a watch says; `wait` blocks the calling thread until it has."""

    def __init__(self):
        self.texts = []
        self.said = threading.Event()

    def __call__(self, text):
        self.texts.append(text)
        self.said.set()


def blocks_until(event):
    event.wait(20.0)  # the line that is to be named


async def while_watched(watch, work):
    watching = asyncio.create_task(watch.run())
    await asyncio.sleep(2 * BEAT_SECONDS)
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
    assert len(told.texts) == 1
    first, *stack = told.texts[0].splitlines()
    assert first.startswith("the event loop has not turned for 0 s: it is blocked at ")
    assert any("in blocks_until: event.wait(20.0)" in line for line in stack)
    assert not any("run_until_complete" in line or "runners.py" in line for line in stack)


def test_it_is_said_again_at_growing_distances_and_acted_on_once_it_has_lasted_too_long():
    told, stuck = Told(), Told()
    watch = LoopWatch(report=told, stuck=stuck, stuck_seconds=0.9, blocked_seconds=0.1)

    async def work():
        blocks_until(stuck.said)

    started = time.monotonic()
    asyncio.run(while_watched(watch, work))
    assert time.monotonic() - started >= 0.9
    assert 3 <= len(told.texts) <= 4  # after .1, .2, .4 and .8 s, unless a look comes late
    assert len(stuck.texts) == 1


def test_a_loop_that_turns_is_never_reported_however_long_its_calls_take():
    told = Told()
    watch = LoopWatch(report=told, stuck=told, stuck_seconds=1.0, blocked_seconds=1.0)
    asyncio.run(while_watched(watch, lambda: asyncio.sleep(1.5)))
    assert told.texts == []
    assert watch.blocked_at() == ""


def test_the_lag_is_that_since_it_was_asked_for_last():
    watch = LoopWatch(report=lambda _: None)
    blocked = threading.Event()

    async def work():
        assert max(watch.lag()) < 0.2
        blocked.wait(0.3)
        await asyncio.sleep(2 * BEAT_SECONDS)
        longest = watch.lag()
        await asyncio.sleep(4 * BEAT_SECONDS)
        return longest, watch.lag()

    (p99, longest), (_, after) = asyncio.run(while_watched(watch, work))
    assert p99 <= longest
    assert 0.2 < longest < 5.0
    assert after < longest
    assert watch.lag() == (0.0, 0.0)


def test_a_thread_that_has_ended_has_no_stack():
    thread = threading.Thread(target=lambda: None)
    thread.start()
    number = thread.ident
    thread.join()
    assert stack_of(number or 0) == []
