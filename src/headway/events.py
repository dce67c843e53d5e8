"""Events: facts that the journal keeps, in the order in which they became true. The ledger is their fold (`rules.ledger.apply`).

Frozen and closed: a new event is a type error wherever it is not handled. Times are Unix seconds (virtual seconds in a simulation).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headway.types import Cause, Finish, PayloadReference, Source


class Event(msgspec.Struct, frozen=True, tag_field="event"):
    """Base of all events; `time` is Unix seconds (virtual seconds in a simulation)."""

    time: float


class Admitted(Event, frozen=True, tag="admitted"):
    """A group of `members` rollouts may start; its birth is the version served at that moment."""

    group: int
    prompt_id: str
    epoch: int
    members: int
    birth: int


class Finished(Event, frozen=True, tag="finished"):
    """A rollout is durable: its record lies at `reference` (None in memory).

    `seconds`: how long its attempt took; `size`: bytes of its payload.
    """

    group: int
    member: int
    attempt: int
    reward: float | None
    tokens: int
    sampled_tokens: int
    head: int
    tail: int
    reference: PayloadReference | None = None
    environment: str = ""
    turns: int = 0
    seconds: float = 0.0
    size: int = 0
    finish: Finish = "stop"


class Ingested(Event, frozen=True, tag="ingested"):
    """A group that no engine of this run has just written takes the place of a live one in batch `k`.

    It came from a file (`replay`) or over HTTP (`external`) and stays outside of the gate and of the staleness statistics. `name`: what its
    sender calls it. Its rollouts follow as Finished.
    """

    group: int
    name: str
    source: Source
    members: int
    k: int


class RolloutDropped(Event, frozen=True, tag="rollout_dropped"):
    """A member is lost for good (`final`), or an attempt of it failed and will be retried.

    `finished`: its rollout had finished (and so had ended) before it was lost, to a scorer or to rollout.overlong.
    """

    group: int
    member: int
    attempt: int
    cause: Cause
    detail: str
    sampled_tokens: int
    final: bool
    finished: bool = False


class Ready(Event, frozen=True, tag="ready"):
    """All members of a group have ended and are scored.

    Where a scorer did it, `scores` holds (member, reward) and `score_parts` (member, the named parts of its reward).
    """

    group: int
    zero_advantage: bool
    scores: tuple[tuple[int, float], ...] = ()
    score_parts: tuple[tuple[int, dict[str, float]], ...] = ()


class GroupDropped(Event, frozen=True, tag="group_dropped"):
    """An admitted group will not train. Forgetting it is the refund; `requeued`: its prompt will be tried again."""

    group: int
    cause: Cause
    detail: str
    sampled_tokens: int
    requeued: bool = False


class BatchFormed(Event, frozen=True, tag="batch_formed"):
    """Batch `k` consists of these groups; from now on the next batch is k + 1. `reward_mean` is over all its scored members."""

    k: int
    groups: tuple[int, ...]
    reward_mean: float


class BatchAcknowledged(Event, frozen=True, tag="batch_acknowledged"):
    """The trainer has made version k + 1 out of batch k: its checkpoint is complete."""

    k: int


class Published(Event, frozen=True, tag="published"):
    """Every serving engine serves `version` (or newer): new groups are born at it.

    `sync_engine_seconds`: what the sync took, summed over the engines: time in which they could not be counted on.
    """

    version: int
    engines: tuple[str, ...]
    sync_engine_seconds: float = 0.0


class PaceChanged(Event, frozen=True, tag="pace_changed"):
    """`rollout.steps_ahead = "auto"` has chosen anew, by a group's mean latency and the mean cycle between versions."""

    steps_ahead: float
    latency_seconds: float
    cycle_seconds: float


class EngineState(Event, frozen=True, tag="engine_state"):
    """An engine's state changed; `label` is what it was given last.

    `draining`: as `leaving`, and then it takes new weights (engine.weight_sync = "wait").
    `leaving`: it serves what is in flight there, and gets no further rollout; `left`: it has none any more, and is gone.
    """

    engine: str
    state: Literal["serving", "draining", "syncing", "lost", "leaving", "left"]
    label: str


class EvalStarted(Event, frozen=True, tag="eval_started"):
    """An evaluation of `rollouts` rollouts starts on `version`."""

    version: int
    rollouts: int


class EvalFinished(Event, frozen=True, tag="eval_finished"):
    """An evaluation ended; `mixed`: weights were synced meanwhile, or tokens of it are of another version than its own."""

    version: int
    ok: int
    failed: int
    mixed: bool
    sampled_tokens: int = 0


class SourceExhausted(Event, frozen=True, tag="source_exhausted"):
    """The prompt source has no further prompt (epochs are over)."""


class Draining(Event, frozen=True, tag="draining"):
    """No further group is admitted, for the reason given."""

    reason: str


class ConfigChanged(Event, frozen=True, tag="config_changed"):
    """The config differs from the one the run was started with, at these keys."""

    keys: tuple[str, ...]


class Resumed(Event, frozen=True, tag="resumed"):
    """A process took the run up again at `version`, with batch `k` the next to form."""

    version: int
    k: int
    lineage: str


class Continued(Event, frozen=True, tag="continued"):
    """A group that was in flight when the process ended goes on, with the members that had ended by then."""

    group: int


class PromptDropped(Event, frozen=True, tag="prompt_dropped"):
    """A prompt will not be tried again: `quarantined` in any epoch, after `failures` groups that lost too many members; or `missing`.

    `missing`: it was to be tried again, and the prompt source no longer has it.
    """

    prompt_id: str
    epoch: int
    cause: Literal["quarantined", "missing"]
    detail: str
    failures: int = 0


class Ended(Event, frozen=True, tag="ended"):
    """The run ended with this exit code, for this cause."""

    code: int
    cause: str


AnyEvent = (
    Admitted
    | Finished
    | Ingested
    | RolloutDropped
    | Ready
    | GroupDropped
    | BatchFormed
    | BatchAcknowledged
    | Published
    | PaceChanged
    | EngineState
    | EvalStarted
    | EvalFinished
    | SourceExhausted
    | Draining
    | ConfigChanged
    | Resumed
    | Continued
    | PromptDropped
    | Ended
)
