"""An engine of fixed speed ends each turn when its seconds are over on a clock that pauses stop; and one timer is all that takes."""

import asyncio
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.sim.fixed_speed import FixedSpeed
from headway.sim.generation import Writing
from headway.sim.loop import VirtualLoop, run

INSTANTS = st.integers(0, 400).map(lambda tenths: tenths / 10)
OFF = 0.0137  # so that no pause begins or ends when a turn does


async def turn(engine, seconds, *, at=0.0, tokens=100, until=inf, gives_up=inf):
    """Ask for a turn; return when it was over, its stamps (None: none) and how many tokens were written."""
    loop, writing = asyncio.get_running_loop(), Writing(tokens, seconds, min(seconds, until))
    await asyncio.sleep(at - loop.time())
    try:
        async with asyncio.timeout_at(gives_up if gives_up < inf else None):
            stamps = await engine.write(writing)
    except TimeoutError:
        stamps = None
    return loop.time(), stamps, writing.ended_with


async def at(instant, *deeds):
    await asyncio.sleep(instant - asyncio.get_running_loop().time())
    for deed in deeds:
        deed()


def by_hand(start, seconds, pauses, death, gives_up):
    """Return when a turn is over, whether it came to its end, and for how long it was written."""
    stop = min(death, gives_up)
    now, left = start, seconds
    for begin, end in pauses:
        if end > now:
            running = max(0.0, begin - now)
            if left <= running:
                break
            if stop <= max(begin, now):
                return stop, False, seconds - left + min(running, stop - now)
            left -= running
            now = end
            if stop <= end:
                return stop, False, seconds - left
    if now + left < stop:
        return now + left, True, seconds
    return stop, False, seconds - left + stop - now


@given(
    st.lists(st.tuples(INSTANTS, st.sampled_from([0.3, 1.0, 2.5, 7.1, 40.0]), st.one_of(st.none(), INSTANTS)), min_size=1, max_size=8),
    st.lists(INSTANTS, max_size=6, unique=True),
    st.one_of(st.none(), INSTANTS),
)
def test_a_turn_ends_when_a_stepper_says_that_knows_no_clock_of_the_engine(turns, instants, death):
    dies = inf if death is None else death + 2 * OFF
    edges = sorted(instant + OFF for instant in instants)
    pauses = list(zip(edges[::2], edges[1::2], strict=False))
    script = [(start, seconds, inf if stay is None else start + stay + 3 * OFF) for start, seconds, stay in turns]

    async def main():
        engine = FixedSpeed(0, [(dies, inf)] if dies < inf else [])
        syncs = [at(begin, engine.pause) for begin, _ in pauses] + [at(end, engine.resume) for _, end in pauses]
        asked = [turn(engine, seconds, at=start, gives_up=gives_up) for start, seconds, gives_up in script]
        results = await asyncio.gather(*asked, *syncs)
        return results[: len(asked)], engine.sampled

    results, sampled = run(main())
    assert sampled == sum(written for _, _, written in results)
    for (start, seconds, gives_up), (over, stamps, written) in zip(script, results, strict=True):
        if start >= dies:
            assert (over, stamps, written) == (start, None, 0)
            continue
        expected, whole, ran = by_hand(start, seconds, pauses, dies, gives_up)
        assert over == pytest.approx(expected, abs=1e-6)
        assert (stamps is not None) == whole
        assert written == pytest.approx(100 * ran / seconds, abs=1.0)


def test_a_pause_within_a_pause_is_one_pause():
    async def main():
        engine = FixedSpeed(0)
        syncs = at(1.0, engine.pause), at(2.0, engine.pause), at(3.0, engine.resume), at(3.5, engine.resume)
        return (await asyncio.gather(turn(engine, 2.0), *syncs))[0]

    assert run(main()) == (4.0, [(0, 0)], 100)


@given(st.lists(st.tuples(st.floats(0.01, 3), st.floats(0.01, 3)), min_size=1, max_size=12))
def test_a_turn_that_is_over_as_a_pause_begins_is_over_however_sums_round(gaps):
    async def main():
        engine, over = FixedSpeed(0), []
        for gap, pause in gaps:
            begun = asyncio.get_running_loop().time()
            sync = asyncio.create_task(at(begun + gap, engine.pause))
            asked = asyncio.create_task(turn(engine, gap, at=begun))
            await sync
            await asyncio.sleep(pause)
            engine.resume()
            over.append(((await asked)[0] - begun - gap, (await asked)[2]))
        return over

    assert run(main()) == [(pytest.approx(0.0, abs=1e-6), 100)] * len(gaps)


def test_an_engine_that_dies_while_it_is_paused_ends_its_turns_in_that_instant():
    async def main():
        engine = FixedSpeed(0, [(2.0, 10.0)])
        syncs = at(1.0, engine.pause), at(12.0, engine.resume)
        return (await asyncio.gather(turn(engine, 4.0), turn(engine, inf), turn(engine, 1.0, at=1.5), *syncs))[:3]

    assert run(main()) == [(2.0, None, 25), (2.0, None, 0), (2.0, None, 0)]


def test_a_turn_asked_for_while_the_engine_is_paused_begins_when_it_goes_on():
    async def main():
        engine = FixedSpeed(0)
        return (await asyncio.gather(turn(engine, 2.0, at=1.5), turn(engine, 0.0, at=1.5), at(1.0, engine.pause), at(5.0, engine.resume)))[
            :2
        ]

    assert run(main()) == [(7.0, [(0, 0)], 100), (5.0, [(0, 0)], 100)]


def test_who_gives_up_takes_nobody_along():
    async def main():
        engine = FixedSpeed(0)
        results = await asyncio.gather(turn(engine, 4.0, gives_up=1.0), turn(engine, 5.0), turn(engine, 4.0, at=0.5))
        return results, engine.sampled

    assert run(main()) == ([(1.0, None, 25), (5.0, [(0, 0)], 100), (4.5, [(0, 0)], 100)], 225)


def test_turns_that_end_in_one_instant_end_in_the_order_in_which_they_began():
    async def main():
        engine, order = FixedSpeed(0), []

        async def noted(name, seconds, start):
            await turn(engine, seconds, at=start)
            order.append((name, asyncio.get_running_loop().time()))

        await asyncio.gather(
            noted("a", 4.0, 0.0), noted("b", 2.0, 2.0), noted("c", 3.0, 1.0), at(3.0, engine.pause), at(5.0, engine.resume)
        )
        return order

    assert run(main()) == [("a", 6.0), ("c", 6.0), ("b", 6.0)]


def test_what_is_written_before_and_after_a_version_is_served_is_stamped_so():
    async def main():
        engine = FixedSpeed(4)
        sync = at(1.0, engine.pause), at(3.0, engine.resume, lambda: engine.serve(5))
        return (await asyncio.gather(turn(engine, 4.0), turn(engine, 4.0, until=2.0), turn(engine, 1.0), *sync))[:3]

    whole, broken_off, before = run(main())
    assert whole == (6.0, [(0, 4), (25, 5)], 100)
    assert broken_off == (4.0, [(0, 4), (25, 5)], 50)
    assert before[1:] == ([(0, 4)], 100)


def test_a_turn_without_seconds_takes_no_turn_of_the_loop():
    async def main():
        engine, seen = FixedSpeed(0), []
        asyncio.get_running_loop().call_soon(seen.append, "another turn of the loop")
        return await engine.write(Writing(3, 0.0, 0.0)), [*seen]

    assert run(main()) == ([(0, 0)], [])


def test_one_timer_serves_all_turns_and_a_sync_wakes_none_of_them():
    async def main():
        engine, loop = FixedSpeed(0), asyncio.get_running_loop()
        turns = [asyncio.create_task(turn(engine, 1000.0 + number)) for number in range(500)]
        await asyncio.sleep(1.0)
        assert isinstance(loop, VirtualLoop)
        before = len(loop._timers)
        for _ in range(100):
            engine.pause()
            await asyncio.sleep(1.0)
            engine.resume()
            await asyncio.sleep(1.0)
        timers = len(loop._timers)
        return before, timers, [over for over, _, _ in await asyncio.gather(*turns)]

    before, timers, over = run(main())
    assert before == timers == 1
    assert over == [1100.0 + number for number in range(500)]


def test_turns_that_were_given_up_do_not_pile_up():
    async def main():
        engine = FixedSpeed(0)
        for number in range(2000):
            await turn(engine, inf, at=float(number), gives_up=number + 0.5)
        return len(engine._ends)

    assert run(main()) < 100
