"""Rollouts in worker processes whose engine dies or hangs under a turn: the environment sees nothing, token ids go on exactly."""

import asyncio
import textwrap
from typing import Any

import pytest
from small_models import write_tokenizer

from headway.adapters.workers.moves import Moves
from headway.adapters.workers.processes import ProcessWorkers
from headway.errors import WorkerFailed
from headway.formats.rollout import decode_samples
from headway.formats.wire import GiveUp, Move, Moved
from headway.settings import EnvironmentSection
from headway.testing import EngineProcess, FakeEngine, Reply, Rule
from headway.testing.engine.script import EngineScript
from headway.types import AttemptRequest, EngineAddress, Prompt, Rollout, SamplingParams

ENVIRONMENT = """
    from headway import Outcome

    async def attempt(prompt, policy):
        talk = await policy.open([1, 5])
        seen = []
        for turn in range(3):
            seen.append(list((await talk.generate()).token_ids))
            talk.observe([7])
        return Outcome(1.0, metadata={"seen": seen})
"""


class To:
    """A mover to one engine, asked as often as the list is long."""

    def __init__(self, *engines):
        self.engines = list(engines)
        self.asked = []
        self.give_up: Any = None

    async def __call__(self, failed):
        self.asked.append(failed.url)
        if not self.engines:
            await asyncio.get_running_loop().create_future()
        return self.engines.pop(0)

    def when_it_hangs(self, give_up):
        self.give_up = give_up


@pytest.fixture
async def workers(tmp_path):
    (tmp_path / "moving_environment.py").write_text(textwrap.dedent(ENVIRONMENT))
    write_tokenizer(tmp_path / "model")
    section = EnvironmentSection(entry="moving_environment:attempt", workers=1, cleanup_seconds=2.0)
    pool = await ProcessWorkers.start(section, base=tmp_path, model=tmp_path / "model", lineage="run", logs=tmp_path / "logs")
    yield pool
    await pool.close()


def ask(engine):
    return AttemptRequest(0, 0, 0, Prompt("p", 0, {}), "train", engine.url, 17, SamplingParams(max_tokens=4), 0)


def exact(rollout, spans):
    assert isinstance(rollout, Rollout)
    [sample] = decode_samples(rollout.payload)
    first, second, third = rollout.metadata["seen"]
    assert sample.token_ids.tolist() == [1, 5, *first, 7, *second, 7, *third]
    assert list(zip(sample.span_start.tolist(), sample.span_version.tolist(), strict=True)) == spans
    assert (rollout.turns, rollout.attempt) == (3, 0)


@pytest.mark.e2e
async def test_an_engine_that_is_killed_under_the_second_turn(workers, tmp_path):
    """It had aborted that turn once before: what it wrote of it stays, with its stamps."""
    rules = [
        Rule(nth=(1,), do=Reply(ids=(20, 21))),
        Rule(nth=(1,), do=Reply(ids=(22,), finish="abort")),
        Rule(do=Reply(kill=True)),
    ]
    one = EngineProcess(tmp_path, script=EngineScript(label="run-3"), rules=rules).start()
    try:
        async with FakeEngine([Rule(do=Reply(ids=(23, 24)))], script=EngineScript(label="run-4")) as other:
            move = To(EngineAddress(other.url))
            rollout = await workers.attempt(ask(one), move)
            arrived = [entry["prompt"] for entry in other.log.of("arrived")]
    finally:
        one.kill()
    exact(rollout, [(0, 3), (3, 4)])
    assert rollout.metadata["seen"] == [[20, 21], [22, 23, 24], [23, 24]]
    assert arrived[0] == [1, 5, 20, 21, 7, 22]
    assert (move.asked, rollout.engine) == ([one.url], other.url)


@pytest.mark.e2e
async def test_I10_an_engine_that_hangs_under_the_second_turn(workers):
    rules = [Rule(nth=(1,), do=Reply(ids=(20, 21))), Rule(do=Reply(hang=True))]
    async with (
        FakeEngine(rules, script=EngineScript(label="run-3")) as one,
        FakeEngine([Rule(do=Reply(ids=(23, 24)))], script=EngineScript(label="run-4")) as other,
    ):
        move = To(EngineAddress(other.url))
        going = asyncio.create_task(workers.attempt(ask(one), move))
        await one.until(lambda: len(one.log.of("arrived")) == 2, limit=120.0)  # from another process
        move.give_up(0)
        exact(await going, [(0, 3), (2, 4)])
    assert move.asked == [one.url]


class Wire:
    """The orchestrator's end of the moves of one process."""

    def __init__(self):
        self.sent, self.failed = [], []
        self.moves = Moves(send=self.sent.append, failed=lambda call, error: self.failed.append((call, error)))


async def turns():
    for _ in range(5):
        await asyncio.sleep(0)


ENGINE = EngineAddress("http://a")


async def test_a_question_is_answered_once_and_news_are_passed_on():
    wire, mover = Wire(), To(EngineAddress("http://b"))
    wire.moves.allow(7, mover)
    wire.moves.ask(Move(7, ENGINE))
    await turns()
    mover.give_up(1)
    assert wire.sent == [Moved(7, EngineAddress("http://b")), GiveUp(7, 1)]


async def test_a_call_that_ends_while_it_waits_waits_no_more():
    wire, mover = Wire(), To()
    wire.moves.allow(7, mover)
    wire.moves.ask(Move(7, ENGINE))
    await turns()
    with pytest.raises(WorkerFailed, match="while it is being moved"):
        wire.moves.ask(Move(7, ENGINE))
    wire.moves.refuse(7)
    wire.moves.ask(Move(7, ENGINE))  # its clean-up asks as well
    assert wire.sent == [Moved(7, None), Moved(7, None)]


async def test_a_question_that_cannot_be_answered_is_the_end_of_the_call():
    class Broken(To):
        async def __call__(self, failed):
            raise ValueError("no")

    wire = Wire()
    wire.moves.allow(7, Broken())
    wire.moves.ask(Move(7, ENGINE))
    await turns()
    [(call, error)] = wire.failed
    assert (call, str(error), wire.sent) == (7, "no", [])
