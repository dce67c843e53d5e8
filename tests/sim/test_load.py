"""An engine under load writes as a stepper says that knows no work clock and no heap: it moves every sequence by hand, event by event."""

import asyncio
import copy
from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from load_stepper import CLOSE, Stepper, Turn

from headway.sim.distributions import Fixed
from headway.sim.engine import EngineSettings, SimEngine
from headway.sim.generation import Writing
from headway.sim.load import Load, LoadSettings, Sequence
from headway.sim.loop import run as run_on_virtual_time
from headway.sim.rollouts import RolloutSettings
from headway.sim.worker import SimWorker
from headway.types import AttemptRequest, Checkpoint, EngineAddress, Prompt, SamplingParams


@dataclass
class Played:
    ended: list
    written: list
    stamps: list
    preemptions: int
    seen: list
    sampled: int


def play(load, turns, syncs=(), looks=(), **more):
    """Play the script on an engine, on virtual time."""

    async def one(engine, turn):
        loop, writing = asyncio.get_running_loop(), Writing(turn.tokens, 1.0, 1.0, turn.context)
        await asyncio.sleep(turn.at)
        try:
            async with asyncio.timeout_at(turn.gives_up if turn.gives_up < inf else None):
                stamps = await engine.generation.write(writing)
        except TimeoutError:
            stamps = None
        return loop.time(), writing.ended_with, stamps

    async def sync(engine):
        for version, (start, end) in enumerate(syncs, start=1):
            checkpoint = Checkpoint(version, f"sim-{version}", "")
            await asyncio.sleep(start - asyncio.get_running_loop().time())
            await engine.prepare(checkpoint)
            await asyncio.sleep(end - asyncio.get_running_loop().time())
            await engine.commit(checkpoint)

    async def look(engine):
        seen = []
        for at in looks:
            await asyncio.sleep(at - asyncio.get_running_loop().time())
            seen.append(engine.sampled)
        return seen

    async def main():
        engine = SimEngine("engine-0", EngineSettings(load=load, **more))
        results = await asyncio.gather(look(engine), sync(engine), *(one(engine, turn) for turn in turns))
        ended, written, stamps = map(list, zip(*results[2:], strict=True))
        return Played(ended, written, stamps, engine.generation.preemptions, results[0], engine.sampled)

    return run_on_virtual_time(main(), limit_seconds=1e9)


def per_token(stamps, tokens):
    ends = [first for first, _ in stamps[1:]] + [tokens]
    return [version for (first, version), end in zip(stamps, ends, strict=True) for _ in range(first, end)]


TIMES = st.integers(0, 2000).map(lambda hundredths: hundredths / 100)


@st.composite
def loads(draw):
    return LoadSettings(
        tokens_per_second=draw(st.sampled_from([7.3, 31.0])),
        half_speed_at=draw(st.sampled_from([0.0, 1.0, 3.7])),
        prefill_tokens_per_second=draw(st.sampled_from([0.0, 23.0, 310.0])),
        max_sequences=draw(st.sampled_from([0, 1, 3])),
        kv_tokens=draw(st.sampled_from([0, 60, 150, 400])),
        recompute_kv=draw(st.booleans()),
    )


@st.composite
def scripts(draw):
    """No two things happen at one instant by themselves."""
    turns = [
        Turn(at + 0.00037 * number, context, tokens, at + stay + 0.00029 * number if stay else inf)
        for number, (at, context, tokens, stay) in enumerate(
            draw(
                st.lists(st.tuples(TIMES, st.integers(0, 120), st.integers(1, 90), st.one_of(st.just(0.0), TIMES)), min_size=1, max_size=9)
            )
        )
    ]
    instants = sorted(draw(st.lists(TIMES, max_size=6, unique=True)))
    syncs = [(start + 0.000171, end + 0.000193) for start, end in zip(instants[::2], instants[1::2], strict=False)]
    looks = [at + 0.000211 for at in sorted(draw(st.lists(TIMES, max_size=5, unique=True)))]
    return turns, syncs, looks


@given(loads(), scripts())
@settings(deadline=None, max_examples=150)
def test_an_engine_under_load_does_what_a_stepper_says_that_moves_every_sequence_by_hand(load, script):
    turns, syncs, looks = script
    played = play(load, turns, syncs, looks)
    stepper = Stepper(load, turns, syncs, looks).run()
    assert played.ended == pytest.approx([turn.ended for turn in turns], abs=1e-5)
    assert played.written == [int(turn.written + CLOSE) for turn in turns]
    assert played.preemptions == stepper.preemptions
    assert played.seen == stepper.seen
    assert played.sampled == sum(played.written)
    for turn, stamps in zip(turns, played.stamps, strict=True):
        assert stamps is None or per_token(stamps, turn.tokens) == turn.versions


@given(scripts())
@settings(deadline=None, max_examples=40)
def test_without_any_limit_it_is_the_engine_of_fixed_speed(script):
    turns, syncs, _looks = script
    speed = 7.3

    async def one(engine, turn):
        writing = Writing(turn.tokens, turn.tokens / speed, turn.tokens / speed, turn.context)
        await asyncio.sleep(turn.at)
        return await engine.generation.write(writing), asyncio.get_running_loop().time()

    async def sync(engine):
        for version, (start, end) in enumerate(syncs, start=1):
            await asyncio.sleep(start - asyncio.get_running_loop().time())
            await engine.prepare(Checkpoint(version, f"sim-{version}", ""))
            await asyncio.sleep(end - asyncio.get_running_loop().time())
            await engine.commit(Checkpoint(version, f"sim-{version}", ""))

    async def main(load):
        engine = SimEngine("engine-0", EngineSettings(load=load))
        results = await asyncio.gather(sync(engine), *(one(engine, turn) for turn in turns))
        return results[1:], engine.sampled, engine.generation.states, engine.generation.sequence_seconds

    fixed, sampled, states, seconds = run_on_virtual_time(main(None))
    loaded, sampled_too, states_too, seconds_too = run_on_virtual_time(main(LoadSettings(speed)))
    assert [stamps for stamps, _ in loaded] == [stamps for stamps, _ in fixed]
    assert [at for _, at in loaded] == pytest.approx([at for _, at in fixed], abs=1e-6)
    assert sampled_too == sampled
    assert [state for _, state in states_too] == [state for _, state in states]
    assert [at for at, _ in states_too] == pytest.approx([at for at, _ in states], abs=1e-6)
    assert seconds_too == pytest.approx(seconds, abs=1e-6)


def test_two_share_the_speed_and_the_one_that_is_left_has_it_for_itself():
    load = LoadSettings(tokens_per_second=10.0, half_speed_at=2.0)
    assert play(load, [Turn(0.0, 0, 50), Turn(0.0, 0, 100)]).ended == pytest.approx([10.0, 10.0 + 50 / (10.0 / 1.5)])


def test_nothing_decodes_while_a_prompt_is_prefilled():
    load = LoadSettings(tokens_per_second=10.0, prefill_tokens_per_second=100.0)
    assert play(load, [Turn(0.0, 100, 50), Turn(2.0, 300, 10)]).ended == pytest.approx([1.0 + 5.0 + 3.0, 2.0 + 3.0 + 1.0])


def test_who_finds_the_batch_full_waits_for_the_first_to_leave_in_the_order_of_coming():
    load = LoadSettings(tokens_per_second=10.0, max_sequences=2)
    turns = [Turn(0.0, 0, 30), Turn(0.0, 0, 80), Turn(1.0, 0, 20), Turn(0.5, 0, 10)]
    assert play(load, turns).ended == pytest.approx([3.0, 8.0, 6.0, 4.0])


def test_the_youngest_goes_back_when_the_cache_is_full_keeps_its_tokens_and_is_prefilled_with_them():
    load = LoadSettings(tokens_per_second=10.0, prefill_tokens_per_second=100.0, kv_tokens=100)
    played = play(load, [Turn(0.0, 0, 80), Turn(0.0, 0, 70)])
    assert played.preemptions == 1  # after 5 s, with 50 tokens each
    assert played.ended == pytest.approx([8.0, 8.0 + 0.5 + 2.0])


def test_after_a_sync_what_is_in_flight_is_prefilled_again_and_the_rest_of_it_is_of_the_new_version():
    load = LoadSettings(tokens_per_second=10.0, prefill_tokens_per_second=100.0)
    turn = Turn(0.0, 100, 100)
    played = play(load, [turn], [(6.0, 8.0)])
    assert played.ended == pytest.approx([1.0 + 10.0 + 2.0 + 1.5])
    assert played.stamps == [[(0, 0), (50, 1)]]
    assert play(LoadSettings(10.0, prefill_tokens_per_second=100.0, recompute_kv=False), [turn], [(6.0, 8.0)]).ended == pytest.approx(
        [13.0]
    )


def test_a_dead_engine_fails_what_is_in_flight_and_in_line_and_takes_nothing_until_it_is_back():
    load = LoadSettings(tokens_per_second=10.0, max_sequences=1)
    turns = [Turn(0.0, 0, 100), Turn(1.0, 0, 100), Turn(5.0, 0, 100), Turn(7.0, 0, 10)]
    played = play(load, turns, deaths=((4.0, 6.0),))
    assert played.ended == pytest.approx([4.0, 4.0, 5.0, 8.0])
    assert played.written == [40, 0, 0, 10]
    assert played.stamps == [None, None, None, [(0, 0)]]
    assert played.sampled == 50


@pytest.mark.parametrize(("sync_at", "moved", "prefilled"), [(None, 0, 100 + 8), (2.5, 0, 100 + 118), (None, 1, 100 + 118)])
def test_of_a_later_turn_only_what_is_new_is_prefilled_where_the_engine_has_the_rest(sync_at, moved, prefilled):
    load = LoadSettings(tokens_per_second=10.0, prefill_tokens_per_second=100.0)
    settings = RolloutSettings(seconds=Fixed(2.0), tokens_per_second=10.0, prompt_tokens=100, turns=2, tool_seconds=Fixed(2.0))

    class Move:
        async def __call__(self, failed):
            return EngineAddress("sim://engine-1")

        def when_it_hangs(self, give_up):
            raise AssertionError("it never hangs")

    async def main():
        engines = [SimEngine(f"engine-{number}", EngineSettings(load=load)) for number in range(2)]
        if moved:
            engines[0] = SimEngine("engine-0", EngineSettings(load=load, deaths=((3.0, inf),)))
        worker = SimWorker(settings, engines)
        request = AttemptRequest(0, 0, 0, Prompt("p", 0, {}), "train", "engine-0", 0, SamplingParams(), 0)
        attempt = asyncio.ensure_future(worker.attempt(request, Move()))
        if sync_at is not None:
            await asyncio.sleep(sync_at)
            await engines[0].prepare(Checkpoint(1, "sim-1", ""))
            await engines[0].commit(Checkpoint(1, "sim-1", ""))
        return await attempt

    result = run_on_virtual_time(main())
    assert result.tokens == 100 + 10 + 8 + 10
    assert result.finished == pytest.approx(prefilled / 100 + 1.0 + 2.0 + 1.0)


def ahead(load):
    """Return after how many seconds a sequence is done or put back, by playing a copy on event by event; infinite: nothing will."""
    load, seconds, before = copy.deepcopy(load), 0.0, load.preemptions
    while (needed := load.needed()) < inf:
        seconds += needed
        if load.advance(needed) or load.preemptions > before:
            return seconds
    return inf


@given(
    loads(),
    st.lists(st.tuples(st.integers(1, 90), st.integers(0, 50), st.floats(0.0, 4.0), st.booleans()), min_size=1, max_size=12),
)
@settings(deadline=None)
def test_an_engine_is_quiet_until_somebody_is_done_or_put_back_and_looks_up_no_later(load_settings, script):
    load = Load(load_settings)
    for tokens, context, seconds, recomputes in script:
        load.add(Sequence(float(tokens), context))
        if recomputes:
            load.recompute()
        expected = ahead(load)
        assert load.quiet() <= expected + CLOSE
        if len([one for one in load._prefills if one.state in {"prefilling", "again"}]) <= 1 == len(load._prefills):
            assert load.quiet() == pytest.approx(expected, abs=CLOSE)
        load.advance(seconds)
