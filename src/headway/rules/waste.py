"""The waste ledger: where every token went that the engines sampled. A second fold of the journal, for reports only.

    delivered = all rows added up = tokens of Finished, of attempts that failed, and of evaluations
    undelivered = what the engines count - delivered: never negative

A delivered token is in exactly one row at any time: with its running group (*in flight*), with its ready group or its batch (*waiting*),
and in the end where its batch's row of metrics or the cause of its loss puts it. Undelivered is what engines wrote and nobody received:
attempts that were cancelled or timed out, evaluations cut short, and what is being written now. Replayed and external rollouts are not
counted: no engine of this run has sampled them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headway.events import (
    Admitted,
    AnyEvent,
    BatchAcknowledged,
    BatchFormed,
    EvalFinished,
    Finished,
    GroupDropped,
    Ingested,
    Published,
    Ready,
    Resumed,
    RolloutDropped,
)

BATCH_ROWS = ("trained", "masked", "zero_advantage", "over_length", "not_in_loss")
ROWS: Mapping[str, str] = {
    "trained": "in the loss of a trained batch",
    "masked": "in a trained batch, too old to be in its loss",
    "zero_advantage": "of groups that scored alike",
    "over_length": "dropped or kept out by rollout.overlong",
    "not_in_loss": "kept out of the loss by the environment",
    "stale": "of groups too old to train at all",
    "filtered": "of groups that rollout.filter refused",
    "incomplete": "of groups that lost too many members",
    "cancelled": "of groups that the run's end cut short",
    "failed": "of attempts that failed",
    "lost_in_crash": "of groups that a crash took",
    "evaluation": "of evaluations",
    "waiting": "in groups and batches that are not trained yet",
    "in_flight": "of finished members of groups that still run",
    "not_itemised": "of batches without a row of metrics",
}
"""The rows, and what each counts."""
_BY_A_CRASH = frozenset({"interrupted", "lineage"})


@dataclass(slots=True)
class Waste:
    """Tokens by row (`ROWS`), those of `failed` by cause, and what did not fit together (`problems`, for people).

    `delivered` counts everything; `delivered_by_count` what happened until the engines were asked last, in each process of the run.
    """

    rows: dict[str, int]
    failed: dict[str, int]
    delivered: int
    delivered_by_count: int
    sync_engine_seconds: float
    problems: list[str]


@dataclass(slots=True)
class _Group:
    tokens: dict[int, int] = field(default_factory=dict)
    ready: bool = False

    @property
    def sampled(self) -> int:
        return sum(self.tokens.values())


class _Books:
    def __init__(self, counted_at: Sequence[float]) -> None:
        self.rows: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.delivered = self.delivered_by_count = 0
        self.sync_engine_seconds = 0.0
        self.problems: list[str] = []
        self.live: dict[int, _Group] = {}
        self.formed: dict[int, dict[int, _Group]] = {}
        self.acknowledged: set[int] = set()
        self._counted_at = counted_at
        self._process = 0
        self._gone: dict[int, str] = {}  # groups that ended, by the row or cause that they ended with
        self._replayed: set[int] = set()

    def apply(self, event: AnyEvent) -> None:
        match event:
            case Admitted():
                self.live[event.group] = _Group()
            case Ingested():
                self._replayed.add(event.group)
            case Finished():
                self._finished(event)
            case RolloutDropped():
                self._rollout_dropped(event)
            case Ready():
                if event.group in self.live:
                    self.live[event.group].ready = True
            case GroupDropped():
                if event.group in self.live:
                    self._end(event.group, "lost_in_crash" if event.cause in _BY_A_CRASH else event.cause)
            case BatchFormed():
                self.formed[event.k] = {group: self.live.pop(group) for group in event.groups if group not in self._replayed}
            case BatchAcknowledged():
                self.acknowledged.add(event.k)
            case EvalFinished():
                self._deliver(event.time, event.sampled_tokens)
                self.rows["evaluation"] += event.sampled_tokens
            case Published():
                self.sync_engine_seconds += event.sync_engine_seconds
            case Resumed():
                self._resumed(event)
            case _:
                pass  # no token moves

    def _deliver(self, time: float, tokens: int) -> None:
        self.delivered += tokens
        if self._process < len(self._counted_at) and time <= self._counted_at[self._process]:
            self.delivered_by_count += tokens

    def _finished(self, event: Finished) -> None:
        if event.group in self._replayed:
            return
        self._deliver(event.time, event.sampled_tokens)
        if event.group in self.live:
            tokens = self.live[event.group].tokens
            tokens[event.member] = tokens.get(event.member, 0) + event.sampled_tokens
        elif event.group in self._gone:  # it became durable in the moment in which its group ended
            self._put(self._gone[event.group], event.sampled_tokens)
        else:
            raise ValueError(f"a rollout of group {event.group} finished, which was never admitted")

    def _rollout_dropped(self, event: RolloutDropped) -> None:
        if event.group in self._replayed:
            return
        if not event.finished:
            self._deliver(event.time, event.sampled_tokens)
            self._put(event.cause, event.sampled_tokens)
        elif event.group in self.live:
            self._put(event.cause, self.live[event.group].tokens.pop(event.member, 0))

    def _end(self, group: int, cause: str) -> None:
        self._put(cause, self.live.pop(group).sampled)
        self._gone[group] = cause

    def _put(self, cause: str, tokens: int) -> None:
        if cause in ROWS:
            self.rows[cause] += tokens
        else:
            self.rows["failed"] += tokens
            self.failed[cause] += tokens

    def _resumed(self, event: Resumed) -> None:
        """Batches from `event.k` on are dissolved into their groups. Of what ran, events tell: it goes on, or is dropped."""
        self._process += 1
        for k in [k for k in self.formed if k >= event.k]:
            self.live.update(self.formed.pop(k))
            self.acknowledged.discard(k)

    def settle(self, fates: Mapping[int, Mapping[str, int]]) -> None:
        """Put what has not ended into its row, and what has trained where its batch's row of metrics puts it."""
        for group in self.live.values():
            self.rows["waiting" if group.ready else "in_flight"] += group.sampled
        for k, groups in self.formed.items():
            tokens = sum(map(_sampled, groups.values()))
            if k in self.acknowledged:
                self._itemise(k, tokens, fates.get(k))
            else:
                self.rows["waiting"] += tokens

    def _itemise(self, k: int, tokens: int, fates: Mapping[str, int] | None) -> None:
        if fates is None:
            self.rows["not_itemised"] += tokens
            return
        told = 0
        for name in BATCH_ROWS:
            count = fates.get(name, 0)
            self.rows[name] += count
            told += count
        self.rows["not_itemised"] += tokens - told
        if told != tokens:
            self.problems.append(f"batch {k}: the journal counts {tokens} sampled tokens, its row of metrics {told}")


def _sampled(group: _Group) -> int:
    return group.sampled


def waste(events: Iterable[AnyEvent], fates: Mapping[int, Mapping[str, int]], counted_at: Sequence[float] = ()) -> Waste:
    """Fold a history. `fates`: `token_fates` by batch, of the trained ones; `counted_at`: when each process last asked the engines.

    Raises ValueError when the history contradicts itself.
    """
    books = _Books(counted_at)
    for event in events:
        books.apply(event)
    books.settle(fates)
    rows = {name: books.rows[name] for name in ROWS}
    return Waste(rows, dict(+books.failed), books.delivered, books.delivered_by_count, books.sync_engine_seconds, books.problems)
