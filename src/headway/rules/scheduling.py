"""Choices around a rollout: whose turn it is, which engine serves it, its seed, its retries; who joins, what is due, when a run ends."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import NamedTuple, TypeVar

from headway.rules.view import LedgerView
from headway.settings import EvalSection, FinishWhen
from headway.types import EngineAddress, Prompt, Purpose

Engine = TypeVar("Engine")


def turn(*, free: int, group_size: int, train_waits: bool, eval_waits: bool, last: Purpose) -> Purpose | None:
    """Say who may take the free rollout slots: a training group (`group_size` slots), an evaluation rollout (1 slot), or nobody yet.

    When both wait they are served in turn, and freed slots are kept for the one whose turn it is: a stream of evaluation rollouts, each
    content with one slot, would otherwise never let `group_size` slots gather, and groups would never let one be left.
    """
    if train_waits and eval_waits:
        train_waits, eval_waits = last == "eval", last == "train"
    if train_waits:
        return "train" if free >= group_size else None
    if eval_waits:
        return "eval" if free >= 1 else None
    return None


EngineLoad = tuple[bool, int, int]
"""What an engine has to do: whether it is under a weight sync, its rollouts, and when it was chosen last, in choices."""


def next_engine(engines: Iterable[Engine], load: Callable[[Engine], EngineLoad]) -> Engine:
    """Return the engine with the fewest rollouts, of those under no weight sync if there are any.

    Ties go to the one that was chosen longest ago: where rollouts are short all engines are idle most of the time, and none may starve.
    """
    return min(engines, key=load)


def publication_due(version: int, offered: int, every: int) -> bool:
    """Whether engines are to be given a version. `offered`: the newest that they were; `every`: trainer.publish_every.

    Every n-th is, or the first that is seen after it where that one was overtaken, so that never more than n - 1 versions are passed over.
    """
    return version // every > offered // every


class RosterChange(NamedTuple):
    """What is to be done about engines: those to join, by URL, and the names of those to leave and to stay."""

    join: tuple[str, ...]
    leave: tuple[str, ...]
    stay: tuple[str, ...]


def roster_change(here: Mapping[str, EngineAddress], wanted: Mapping[str, EngineAddress], fixed: Collection[str]) -> RosterChange:
    """Compare the engines that joined, by name, with those that are wanted, by URL. `fixed`: URLs of others, which are neither.

    A server has one client at a time: while one leaves, nobody joins at its URL, also not as another kind.
    """
    stay = tuple(name for name, address in here.items() if wanted.get(address.url) == address)
    taken = {address.url for address in here.values()} | set(fixed)
    return RosterChange(tuple(url for url in wanted if url not in taken), tuple(name for name in here if name not in stay), stay)


def rollout_seed(run_seed: int, purpose: Purpose, prompt: Prompt, member: int, attempt: int) -> int:
    """Return the sampling seed (63 bits) of an attempt: the same in every run, distinct for every member and attempt."""
    key = f"{run_seed}\x1f{purpose}\x1f{prompt.id}\x1f{prompt.epoch}\x1f{prompt.tries}\x1f{member}\x1f{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def retry_delay_seconds(attempt: int, seed: int) -> float:
    """Return how long to wait before attempt `attempt` (>= 1): .1 s doubling up to 10 s, spread by the seed to 50-100 %."""
    return backoff_seconds(attempt, (seed % 1024) / 1024, first=0.1, longest=10.0)


def backoff_seconds(tries: int, share: float, *, first: float, longest: float) -> float:
    """Return how long to wait after `tries` (>= 1) tries in a row: `first` doubling up to `longest`, spread by `share` to 50-100 %."""
    return min(longest, first * 2.0 ** min(tries - 1, 30)) * (0.5 + share / 2)


def eval_due(ledger: LedgerView, settings: EvalSection) -> bool:
    """Whether the version served now is to be evaluated: every `every` versions, each once, the newest only after a jump."""
    version = ledger.version
    if version < 0 or ledger.eval_running is not None:
        return False
    if ledger.last_eval < 0 and version < settings.every:
        return settings.at_start and version == 0
    return version // settings.every > max(ledger.last_eval, 0) // settings.every


def sync_must_wait(ledger: LedgerView, settings: EvalSection | None) -> bool:
    """Whether a weight sync would disturb an evaluation that runs or is about to start."""
    return settings is not None and (ledger.eval_running is not None or eval_due(ledger, settings))


def reward_reached(ledger: LedgerView, finish_when: FinishWhen | None) -> bool:
    """Whether the mean reward over the last `over_batches` *trained* batches is above the target."""
    if finish_when is None:
        return False
    trained = islice((reward for k, reward in reversed(ledger.rewards) if k < ledger.trained), finish_when.over_batches)
    rewards = list(trained)
    return len(rewards) == finish_when.over_batches and _mean(rewards) > finish_when.reward_above


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def run_is_complete(ledger: LedgerView, steps: int, finish_when: FinishWhen | None) -> str:
    """Return why the run has reached its end ("" while it has not): all steps trained, the reward reached, or the data used up."""
    if ledger.trained >= steps:
        return f"all {steps} steps are trained"
    if finish_when is not None and reward_reached(ledger, finish_when):
        return f"the mean reward of the last {finish_when.over_batches} batches is above {finish_when.reward_above}"
    left = ledger.waiting_prompts or ledger.running or ledger.ready or ledger.ingested
    if ledger.exhausted and not left and ledger.trained == ledger.next_batch:
        return "the prompts are used up"
    return ""


def why_barren(ledger: LedgerView) -> str:
    """Say what became of the groups that could not train, most frequent first, and where to look."""
    counts = [(f"groups dropped as {cause}", count) for cause, count in ledger.dropped.items()]
    counts += [(f"attempts lost by {cause}", count) for cause, count in ledger.lost.items()]
    if ledger.alike:
        counts.append(("groups whose members all scored alike", ledger.alike))
    listed = ", ".join(f"{what} {count}" for what, count in sorted(counts, key=lambda item: -item[1]))
    hint = "look at the reward: does it ever vary within a group?"
    return f"{listed}; the last lost was {ledger.last_loss}" if ledger.lost else f"{listed}: {hint}"
