"""C06: replies that come at the moment at which somebody stops waiting for them: each rollout resolves once, and nobody waits on."""

import asyncio
import textwrap
from collections import Counter

from bound_world import bounded, bounded_world, play
from scripted_engine import ScriptedEngine, Tokens
from small_models import write_tokenizer

from headway.adapters.workers.processes import ProcessWorkers
from headway.events import Finished, RolloutDropped
from headway.settings import EnvironmentSection
from headway.sim.distributions import Uniform
from headway.sim.engine import EngineSettings
from headway.types import AttemptRequest, Prompt, Rollout, SamplingParams

TIMEOUT = 1.0
AROUND = Uniform(TIMEOUT - 0.002, TIMEOUT + 0.002)


def test_C06_20000_rollouts_that_end_within_two_milliseconds_of_their_deadline_resolve_exactly_once():
    section = bounded("mask", 2, groups_per_batch=32, group_size=8, timeout_seconds=TIMEOUT, max_attempts=1, max_prompt_failures=100)
    result = play(bounded_world(AROUND, engines=[EngineSettings(pauses=False)]), section, 79)  # and its books add up, rollout by rollout
    ended = Counter()
    for event in result.events:
        if isinstance(event, Finished) or (isinstance(event, RolloutDropped) and event.final and not event.finished):
            ended[event.group, event.member] += 1
    late = sum(isinstance(event, RolloutDropped) for event in result.events)
    assert len(ended) >= 20_000
    assert set(ended.values()) == {1}
    assert 0.4 < late / len(ended) < 0.6


ANSWERS = """
    import asyncio
    from headway import Outcome

    async def attempt(prompt, policy):
        talk = await policy.open([5])
        await talk.generate()
        await asyncio.sleep(prompt.fields["seconds"])
        return Outcome(float(prompt.fields["number"]))
"""


async def test_C06_answers_of_a_worker_that_race_with_their_cancellation_are_for_nobody_else_and_leave_nobody_waiting(tmp_path):
    (tmp_path / "racing_environment.py").write_text(textwrap.dedent(ANSWERS))
    write_tokenizer(tmp_path / "model")
    section = EnvironmentSection(entry="racing_environment:attempt", cleanup_seconds=60)
    outcomes = Counter()

    async def one(pool, url, number):
        seconds = 0.05 + number % 41 / 1000
        fields = {"seconds": seconds, "number": number}
        request = AttemptRequest(0, number, 0, Prompt("p", 0, fields), "train", url, 17, SamplingParams(max_tokens=4), 0)
        try:
            async with asyncio.timeout(0.07):  # about half are too slow on any machine
                result = await pool.attempt(request)
        except TimeoutError:
            outcomes["late"] += 1
            return
        assert isinstance(result, Rollout)
        assert (result.member, result.reward) == (number, float(number))
        outcomes["in time"] += 1

    async with ScriptedEngine(Tokens([1]), label="abc-1") as engine:
        pool = await ProcessWorkers.start(section, base=tmp_path, model=tmp_path / "model", lineage="abc", logs=tmp_path / "logs")
        try:
            await one_after_the_other(pool, engine.url, one)
            assert outcomes.total() == 1000
            assert outcomes["late"] > 400
            assert isinstance(await pool.attempt(asked(engine.url)), Rollout)
            await engine.until(lambda: not engine.running)
        finally:
            await pool.close()


def asked(url):
    return AttemptRequest(0, 0, 0, Prompt("p", 0, {"seconds": 0.0, "number": 0}), "train", url, 17, SamplingParams(max_tokens=4), 0)


async def one_after_the_other(pool, url, one):
    """1000 attempts, 20 at a time."""
    slots = asyncio.Semaphore(20)

    async def within(number):
        async with slots:
            await one(pool, url, number)

    async with asyncio.timeout(300), asyncio.TaskGroup() as tasks:
        for number in range(1000):
            tasks.create_task(within(number))
