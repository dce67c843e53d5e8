"""What the user's code raises may be hard to tell: without a text, its own cause, no Exception at all. It is told all the same."""

import asyncio

import pytest
from scripted_engine import Status, Tokens
from small_models import EOS, ids_of

from headway import single_turn
from headway.errors import EngineFailed
from headway.types import Failure, Prompt, ScoreRequest

HI = Tokens([*ids_of("hi"), EOS])
SECONDS = 20  # none of it takes any; without a limit a regression would not end


class Mute(Exception):
    """One whose text cannot be had."""

    def __str__(self):
        raise LookupError("no text")


class Panic(BaseException):
    """One as libraries in Rust raise it, and those that put a limit to a function's time: `except Exception` lets it pass."""


def raise_panic():
    raise Panic("index out of bounds")


def raise_mute():
    raise Mute


def raise_round():
    """Raise an error from another one that was raised from it, as a helper does that tries again and gives up with the first."""
    try:
        raise ValueError("first")
    except ValueError as first:
        try:
            raise KeyError("second") from first
        except KeyError as second:
            raise first from second


def find_nothing():
    return next(iter(()))


@pytest.mark.parametrize(
    ("act", "says"),
    [(raise_mute, "Mute: (its text"), (raise_panic, "Panic: index"), (raise_round, "ValueError: first"), (find_nothing, "StopIteration")],
)
@pytest.mark.parametrize("where", ["environment", "reward", "scorer"])
async def test_it_ends_the_attempt_and_says_what_it_was(bench, act, says, where):
    async def environment(prompt, policy):
        talk = await policy.open([5])
        await talk.generate()
        act()

    def reward(prompt, completion):
        return act()

    def scorer(prompt, rollouts):
        return act()

    async with asyncio.timeout(SECONDS):
        if where == "scorer":
            async with bench(single_turn(lambda prompt, completion: 1.0), HI, scorer=scorer) as b:
                rollout = await b.attempt(fields={"prompt": "<bos>say hi"})
                ended = await b.worker.score(ScoreRequest(3, Prompt("p", 0, {}), (rollout,)))
        else:
            async with bench(environment if where == "environment" else single_turn(reward), HI) as b:
                ended = await b.attempt(fields={"prompt": "<bos>say hi"})
    assert isinstance(ended, Failure)
    assert ended.cause == ("score_error" if where == "scorer" else "environment_error")
    assert says in ended.detail


async def test_an_engines_refusal_is_found_behind_causes_that_go_round(bench):
    async def environment(prompt, policy):
        talk = await policy.open([5])
        try:
            await talk.generate()
        except EngineFailed as refusal:
            try:
                raise KeyError("second") from refusal
            except KeyError as second:
                raise refusal from second

    async with asyncio.timeout(SECONDS), bench(environment, Status(400)) as b:
        ended = await b.attempt()
    assert isinstance(ended, Failure)
    assert ended.cause == "engine_error"
