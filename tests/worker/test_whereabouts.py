"""Turns of one attempt that lose their engine ask once, go on together, and hear of an engine that hangs whatever the order of news."""

import asyncio

import pytest

from headway.types import EngineAddress
from headway.worker.whereabouts import Whereabouts

A, B, C = (EngineAddress(f"http://{name}") for name in "abc")


class Asked:
    """A mover whose answers the test gives."""

    def __init__(self):
        self.questions = []
        self.give_up = None

    async def __call__(self, failed):
        answer = asyncio.get_running_loop().create_future()
        self.questions.append((failed, answer))
        return await answer

    def when_it_hangs(self, give_up):
        self.give_up = give_up

    async def answer(self, engine):
        self.questions[-1][1].set_result(engine)
        await turns()


def turn_of(whereabouts):
    """Return how a turn that begins now gets elsewhere: there is a mover."""
    move = whereabouts.of_turn()
    assert move is not None
    return move


async def turns():
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def mover():
    return Asked()


async def given_up(whereabouts):
    try:
        async with whereabouts.in_flight.request():
            await asyncio.sleep(0.01)
    except TimeoutError:
        return True
    return False


async def test_turns_that_fail_together_ask_once(mover):
    whereabouts = Whereabouts(A, mover)
    asking = [asyncio.ensure_future(turn_of(whereabouts)(A)) for _ in range(5)]
    await turns()
    await mover.answer(B)
    assert [await each for each in asking] == [B] * 5
    assert (len(mover.questions), whereabouts.engine) == (1, B)


async def test_a_turn_that_fails_after_others_have_moved_goes_where_they_are_even_where_that_is_the_same_engine_again(mover):
    whereabouts = Whereabouts(A, mover)
    slow, fast = turn_of(whereabouts), turn_of(whereabouts)
    going = asyncio.ensure_future(fast(A))
    await turns()
    await mover.answer(A)  # it was started anew
    assert await going == A
    assert await slow(A) == A
    assert len(mover.questions) == 1
    again = asyncio.ensure_future(slow(A))
    await turns()
    await mover.answer(C)
    assert await again == C
    assert len(mover.questions) == 2


async def test_no_is_the_answer_to_all_who_asked_and_the_engine_stays(mover):
    whereabouts = Whereabouts(A, mover)
    asking = [asyncio.ensure_future(turn_of(whereabouts)(A)) for _ in range(2)]
    await turns()
    await mover.answer(None)
    assert [await each for each in asking] == [None, None]
    assert whereabouts.engine == A


async def test_a_turn_that_is_cancelled_while_it_asks_leaves_the_attempt_moved(mover):
    whereabouts = Whereabouts(A, mover)
    asking = asyncio.ensure_future(turn_of(whereabouts)(A))
    await turns()
    asking.cancel()
    await turns()
    await mover.answer(B)
    assert whereabouts.engine == B


async def test_who_leaves_asks_no_more(mover):
    whereabouts = Whereabouts(A, mover)
    asking = asyncio.ensure_future(turn_of(whereabouts)(A))
    await turns()
    whereabouts.leave()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert mover.questions[0][1].cancelled()


async def test_an_engine_that_hangs_has_its_requests_given_up_until_the_attempt_has_moved(mover):
    whereabouts = Whereabouts(A, mover)
    in_flight = asyncio.ensure_future(given_up(whereabouts))
    await asyncio.sleep(0)
    mover.give_up(0)
    assert await in_flight
    assert await given_up(whereabouts)  # one that comes later, too
    going = asyncio.ensure_future(turn_of(whereabouts)(A))
    await turns()
    await mover.answer(B)
    assert await going == B
    assert not await given_up(whereabouts)


async def test_news_of_the_next_engine_may_come_before_the_attempt_has_taken_the_answer(mover):
    whereabouts = Whereabouts(A, mover)
    asyncio.ensure_future(turn_of(whereabouts)(A))  # noqa: RUF006 -- ends below
    await turns()
    mover.questions[-1][1].set_result(B)
    mover.give_up(1)
    assert whereabouts.engine == A
    await turns()
    assert whereabouts.engine == B
    assert await given_up(whereabouts)


async def test_old_news_counts_no_more(mover):
    whereabouts = Whereabouts(A, mover)
    going = asyncio.ensure_future(turn_of(whereabouts)(A))
    await turns()
    await mover.answer(B)
    await going
    mover.give_up(0)
    assert not await given_up(whereabouts)


async def test_an_attempt_without_a_mover_stays():
    assert Whereabouts(A).of_turn() is None


async def test_a_request_that_is_cancelled_is_cancelled_also_when_it_is_given_up(mover):
    whereabouts = Whereabouts(A, mover)
    task = asyncio.ensure_future(given_up(whereabouts))
    await asyncio.sleep(0)
    mover.give_up(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
