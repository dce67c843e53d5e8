"""Values that flow through headway: frozen, closed, and free of behaviour. What happens to them is in `headway.events`.

A *group* is the unit of admission and consumption: the rollouts of one prompt that are compared together. A rollout is named by
`(group, member)`. Token data travels as one opaque payload (`formats.rollout` encodes and decodes it), so that the orchestrator never
touches a token until a batch is built; the header beside it carries what decisions need.

Versions are policy versions: trainer steps behind a set of weights, counted from 0. Batch `k` trains on version `k` and makes `k + 1`.
Times are Unix seconds unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

OnStale = Literal["mask", "wait", "drop", "train"]
Enforce = Literal["admission", "ship"]
Source = Literal["live", "replay", "external"]
Purpose = Literal["train", "eval"]
EngineKind = Literal["vllm", "sglang"]
"""The protocol that an engine speaks; headway's own speaks vLLM's."""
Finish = Literal["stop", "length", "truncated"]

Cause = Literal[
    "environment_error",  # the user's attempt raised
    "engine_error",  # the engine failed, or its answer could not be used
    "worker_died",  # the process that ran the rollout ended
    "prompt_too_long",  # the prompt does not fit the engine's context
    "timeout",  # rollout.timeout_seconds ran out
    "bad_reward",  # NaN, infinite, None or not a number
    "empty_completion",  # a generation without a token, or a rollout without a sampled token
    "length_mismatch",  # fewer or more logprobs than ids
    "score_error",  # the scorer raised, timed out, or answered nonsense
    "over_length",  # overlong = "drop" or "mask", and the rollout hit a limit
    "incomplete",  # the group lost too many members
    "stale",  # no token young enough to train is left
    "filtered",  # a filter of the user's
    "zero_advantage",  # all members scored alike, and it was replaced or could not train alone
    "cancelled",  # stopped by the run itself: a drain limit, a stop
    "interrupted",  # in flight when the process ended
    "lineage",  # written by weights that this run no longer has
]


TransferWay = Literal["directory", "delta", "memory", "lora"]
"""How weights come to an engine: the complete directory, what has changed in it, a copy in memory, an adapter."""


class Transferred(msgspec.Struct, frozen=True):
    """What one engine was told to load: the bytes of the tensors there, and how long loading took, tries that it refused included."""

    way: TransferWay
    bytes: int
    seconds: float


class Prompt(msgspec.Struct, frozen=True):
    """One task to attempt. `fields` holds the row of the data set (JSON values), `epoch` counts passes from 0.

    `tries`: how often it was admitted before in this epoch and came back without having trained.
    """

    id: str
    epoch: int
    fields: dict[str, Any]
    tries: int = 0


@dataclass(frozen=True, slots=True)
class DataPosition:
    """What of a prompt source is left for a run that is taken up again, by ids and not by a count: a source may have grown meanwhile.

    `epoch` is the newest one reached; of it `consumed` has been admitted. Of older epochs only what is `waiting` is left: (id, epoch) of
    the prompts to be tried again, with how often they were tried before.
    """

    epoch: int = 0
    consumed: frozenset[str] = frozenset()
    waiting: Mapping[tuple[str, int], int] = field(default_factory=dict)

    @property
    def first_epoch(self) -> int:
        """The oldest epoch of which something is left."""
        return min((epoch for _, epoch in self.waiting), default=self.epoch)

    def has_left(self, prompt_id: str, epoch: int) -> bool:
        """Whether a prompt is still to be admitted in this epoch."""
        return epoch > self.epoch or (epoch == self.epoch and prompt_id not in self.consumed) or (prompt_id, epoch) in self.waiting


class SamplingParams(msgspec.Struct, frozen=True):
    """How an engine samples. `max_tokens` bounds one generation; `top_k` 0 and `top_p` 1 switch those off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256


class AttemptRequest(msgspec.Struct, frozen=True):
    """Ask a worker to attempt a prompt once, against one engine. The seed is distinct per member and attempt, and reproducible."""

    group: int
    member: int
    attempt: int
    prompt: Prompt
    purpose: Purpose
    engine: str  # base URL (or the in-memory engine's name)
    seed: int
    sampling: SamplingParams
    max_rollout_tokens: int  # bound on prompt + sampled + observed tokens of one sample; 0: the engine's context only
    kind: EngineKind = "vllm"  # what the engine speaks
    lora: bool = False  # the policy is the newest LoRA adapter of this run that the engine has


class EngineAddress(msgspec.Struct, frozen=True):
    """Where generations are sent: a base URL, and what the engine there speaks."""

    url: str
    kind: EngineKind = "vllm"


class PayloadReference(msgspec.Struct, frozen=True, array_like=True):
    """Where a payload lies: segment file number, byte offset and length of the record, CRC-32 of its payload."""

    segment: int
    offset: int
    length: int
    checksum: int


class Rollout(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finished attempt: the header that decisions need, and the encoded samples.

    `head` / `tail` are the oldest / newest version among tokens that may contribute (loss_mask set). `reward` is None until scored when a
    scorer is configured. `tokens` counts all token positions, `sampled_tokens` those the engine wrote.
    """

    group: int
    member: int
    attempt: int
    prompt_id: str
    environment: str
    reward: float | None
    rewards: dict[str, float]
    finish: Finish
    turns: int
    started: float
    finished: float
    engine: str
    metadata: dict[str, Any]
    samples: int
    tokens: int
    sampled_tokens: int
    head: int
    tail: int
    payload: bytes  # formats.rollout.encode_samples(...); empty: left on disk, at `reference`
    source: Source = "live"
    reference: PayloadReference | None = None  # where the journal has its record; None: nowhere yet


class Failure(msgspec.Struct, frozen=True):
    """An attempt that brought no rollout. `retryable` False: another attempt would end alike.

    `detail` is for people: its first line says it all, a traceback may follow.
    """

    cause: Cause
    detail: str
    retryable: bool
    sampled_tokens: int = 0


class Score(msgspec.Struct, frozen=True):
    """A scorer's verdict on one rollout; `reward` None: nobody could tell, the member is lost as `bad_reward`."""

    reward: float | None
    rewards: dict[str, float] = {}


class ScoreRequest(msgspec.Struct, frozen=True):
    """Ask a worker to score finished rollouts of one prompt: one of them, or all of a group together."""

    group: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One token sequence of a rollout that can be trained on; n positions, m version spans.

    `token_ids` int32 (n); `sampled_mask` bool (n): written by the engine; `loss_mask` bool (n): may contribute (a subset of sampled);
    `logprobs` float32 (n): behaviour log-probabilities, finite, 0 where not sampled; `span_start` / `span_version` int32 (m): run-length
    encoded stamps over the *sampled* tokens in order: span j starts at sampled token `span_start[j]` (span_start[0] == 0) and was written
    by policy version `span_version[j]`.
    """

    token_ids: npt.NDArray[np.int32]
    sampled_mask: npt.NDArray[np.bool_]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    span_start: npt.NDArray[np.int32]
    span_version: npt.NDArray[np.int32]
    policy_id: str = "policy"
    extras: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


class Admission(msgspec.Struct, frozen=True):
    """Leave for one group to start, granted by the gate: `members` rollouts of `prompt`, born at version `birth`."""

    group: int
    prompt: Prompt
    members: int
    birth: int


@dataclass(frozen=True, slots=True)
class ContinuedGroup:
    """A group of an interrupted run that goes on: the rollouts that had finished, and the members lost for good, by number, with causes.

    The members that are in neither start again.
    """

    admission: Admission
    rollouts: tuple[Rollout, ...]
    lost: Mapping[int, Cause]


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A group whose members have all ended: the rollouts that finished (durable), and the members that were lost, by cause."""

    admission: Admission
    rollouts: tuple[Rollout, ...]
    lost: tuple[Cause, ...]


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A scored group that a batch may take. `advantages` aligns with `rollouts`; every reward is a finite number.

    `ready_version`: the version that was served when it became ready; what is staler than that grew stale in the queue.
    """

    admission: Admission
    rollouts: tuple[Rollout, ...]
    advantages: tuple[float, ...]
    ready_version: int = 0

    @property
    def zero_advantage(self) -> bool:
        """Whether no member can move the policy: all scored alike."""
        return not any(self.advantages)


@dataclass(frozen=True, slots=True)
class Batch:
    """The whole groups that trainer step `k` consumes, oldest birth first, and the rule by which tokens contribute."""

    k: int
    groups: tuple[ReadyGroup, ...]
    max_staleness: int
    on_stale: OnStale
    temperature: float
    overlong_masked: frozenset[tuple[int, int]] = frozenset()  # (group, member) kept out of the loss by overlong = "mask"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete, verified set of weights on disk."""

    version: int
    label: str  # "<lineage>-<version>"
    directory: str
    offers: Mapping[str, Any] = field(default_factory=dict, compare=False)  # other ways to the weights, by the trainer's manifest
