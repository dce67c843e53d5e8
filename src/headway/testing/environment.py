"""A scripted environment, as a worker imports it: `headway.testing.environment:attempt`, `:score`, `:score_group` and `:prompts`.

It does what the JSON file named by HEADWAY_FAKE_ENVIRONMENT says, in every worker process alike (they inherit the variable), and logs what
it does to the file that the script names:

    reset, step {turn, ids, text, finish}, score, close, cancel, raised {error}    each with {prompt, purpose, group, member, attempt}

`reset` begins an attempt, and exactly one `close` ends it however it ends, unless its process is killed. Counts of rules are shared by all
processes, also by those that are started later.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from headway.protocols import Conversation, Outcome, Policy
from headway.testing.acts import VARIABLE, Act, EnvironmentScript, Fault, Turn
from headway.testing.log import FakeLog
from headway.testing.rules import first_firing
from headway.types import Prompt, Score

_spawned: list[subprocess.Popen[bytes]] = []


def prompts() -> list[dict[str, Any]]:
    """Return the prompts of the script."""
    return [{"id": f"p{number:04d}", "number": number} for number in range(_script().prompts)]


def prompt_stream() -> Iterator[dict[str, Any]]:
    """Yield prompts without end, named alike; for `prompts.shuffle = false`."""
    for number in itertools.count():
        yield {"id": f"p{number:04d}", "number": number}


async def attempt(prompt: Prompt, policy: Policy) -> Outcome:
    """Play one attempt as the script says."""
    facts = _facts(prompt, policy)
    act = _act({**facts, "epoch": prompt.epoch, "what": "attempt"})
    log = _log()
    log.add("reset", **facts)
    try:
        return await _play(act, prompt, policy, log, facts)
    except asyncio.CancelledError:
        log.add("cancel", **facts)
        raise
    except Exception as error:
        log.add("raised", error=f"{type(error).__name__}: {error}", **facts)
        raise
    finally:
        try:
            if act.close_seconds:
                await asyncio.sleep(act.close_seconds)
            if act.close_hang:
                await _for_ever()
        finally:
            log.add("close", **facts)


async def score(prompt: Prompt, rollouts: Sequence[Any]) -> list[Any]:
    """Score each rollout as the script says; rules match on `prompt` and `what` "score"."""
    facts = {**_facts(prompt, None), "purpose": None}
    act = _act({**facts, "epoch": prompt.epoch, "what": "score"})
    _log().add("score", rollouts=len(rollouts), **facts)
    await _befall(act.fault)
    return [
        Score(_reward(act.reward, [int(token) for sample in each.samples for token in sample.token_ids[sample.sampled_mask]]), act.rewards)
        for each in rollouts
    ]


def score_blocking(prompt: Prompt, rollouts: Sequence[Any]) -> list[Any]:
    """Do the same as a plain function, which runs in a thread."""
    return asyncio.run(score(prompt, rollouts))


async def _play(act: Act, prompt: Prompt, policy: Policy, log: FakeLog, facts: dict[str, Any]) -> Outcome:
    await _befall(act.fault)
    sampled: list[int] = []
    for _ in range(act.conversations):
        start: Any = [1, *_digits(prompt.id)] if act.open is None else act.open
        conversation = await policy.open(list(start) if isinstance(start, tuple) else start)
        for number, turn in enumerate(act.turns, 1):
            await _befall(turn.fault)
            if turn.generate:
                sampled += await _turn(conversation, turn, number, log, facts)
            if turn.observe and not turn.tool:
                conversation.observe(list(turn.observe) if isinstance(turn.observe, tuple) else turn.observe)
    await _befall(act.after)
    return Outcome(_reward(act.reward, sampled), act.rewards, metadata={"pid": os.getpid()})


async def _turn(conversation: Conversation, turn: Turn, number: int, log: FakeLog, facts: dict[str, Any]) -> list[int]:
    generation = await conversation.generate(max_tokens=turn.max_tokens)
    ids = list(generation.token_ids)
    log.add("step", turn=number, ids=ids, text=generation.text, finish=generation.finish, **facts)
    if turn.tool:
        observed: Any = turn.observe
        try:
            json.loads(generation.text)
        except ValueError:
            observed = turn.tool_error
        conversation.observe(list(observed) if isinstance(observed, tuple) else observed)
    return ids


async def _befall(fault: Fault) -> None:
    if fault.spawn:
        _spawned.append(subprocess.Popen(fault.spawn))  # noqa: ASYNC220 -- left behind on purpose
    if fault.alarm:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(1)
    if fault.seconds:
        await asyncio.sleep(fault.seconds)
    if fault.block_seconds:
        time.sleep(fault.block_seconds)  # noqa: ASYNC251 -- what it is for
    if fault.spin_seconds:
        until = time.monotonic() + fault.spin_seconds
        while time.monotonic() < until:
            pass
    if fault.error:
        raise RuntimeError(fault.error)
    if fault.exit is not None:
        os._exit(fault.exit)
    if fault.kill:
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.cancel:
        raise asyncio.CancelledError
    if fault.hang:
        await _for_ever()


async def _for_ever() -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError


def _reward(reward: float | bool | str | None, sampled: list[int]) -> Any:  # noqa: FBT001 -- True is one of the wrong rewards
    match reward:
        case "sampled":
            return sum((place + 1) * token for place, token in enumerate(sampled)) % 11 / 10
        case "nan" | "inf" | "-inf":
            return float(reward)
        case _:
            return reward


def _digits(text: str) -> list[int]:
    """Return ids of a prompt's name, within any vocabulary that has digits after three special tokens."""
    return [3 + ord(character) % 10 for character in text]


def _facts(prompt: Prompt, policy: Any) -> dict[str, Any]:
    request = getattr(policy, "request", None)
    return {"prompt": prompt.id, **{name: getattr(request, name, None) for name in ("purpose", "group", "member", "attempt")}}


def _act(facts: dict[str, Any]) -> Act:
    script, what = _script(), facts["what"]
    rules = [(index, rule) for index, rule in enumerate(script.rules) if rule.match.get("what", "attempt") == what]
    fired = first_firing([rule for _, rule in rules], facts, lambda place: _count(rules[place][0]))
    return fired.do if fired is not None else script.default if what == "attempt" else script.default_score


@functools.cache
def _script() -> EnvironmentScript:
    path = os.environ.get(VARIABLE)
    return msgspec.json.decode(Path(path).read_bytes(), type=EnvironmentScript) if path else EnvironmentScript()


@functools.cache
def _log() -> FakeLog:
    return FakeLog(_script().log or None)


def _count(rule: int) -> int:
    """Add one to the count of a rule, shared by all processes that use the script, and return it."""
    script = os.environ.get(VARIABLE)
    if not script:
        return 1
    with Path(f"{script}.counts").open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        counts = json.loads(file.read() or b"{}")
        counts[str(rule)] = counts.get(str(rule), 0) + 1
        file.truncate(0)
        file.write(json.dumps(counts).encode())
        file.flush()
        return int(counts[str(rule)])
