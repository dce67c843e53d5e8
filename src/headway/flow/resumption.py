"""What the components of a resumed run begin with. No payload is read: what stands for a rollout is made of events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from headway.events import Finished
from headway.flow.history import GroupRecord
from headway.flow.user_functions import Advantages, checked_advantages
from headway.rules.ledger import Ledger
from headway.rules.resume import ResumePlan
from headway.types import Admission, ContinuedGroup, DataPosition, FinishedGroup, Prompt, ReadyGroup, Rollout

Prompts = Mapping[tuple[str, int], Prompt]


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """What the components of a resumed run begin with. Everything in it is durable, and its events are in the ledger.

    Rollouts in it are stubs: made from events, `payload` empty, `reference` set. `ready`: complete groups (live ones, and replayed or
    external ones that keep their places), to be in the train sink from the start; `unscored`: complete groups of which the journal has
    no Ready yet (they are running in the ledger), to be scored and sunk; `continued`: groups that start again without their finished
    members. `shipped_again`: (k, metrics row) of persisted batches that are announced to the trainer once more, ascending. `replayed`: how
    many groups of a name a replay source has given already. `plan`: what was decided, for the log.
    """

    ledger: Ledger
    ready: Sequence[ReadyGroup] = ()
    unscored: Sequence[FinishedGroup] = ()
    continued: Sequence[ContinuedGroup] = ()
    shipped_again: Sequence[tuple[int, Mapping[str, Any]]] = ()
    position: DataPosition = field(default_factory=DataPosition)
    replayed: Mapping[str, int] = field(default_factory=dict)
    plan: ResumePlan | None = None


def _admission(group: int, record: GroupRecord, found: Prompts) -> Admission:
    prompt = found.get((record.prompt_id, record.epoch)) if record.source == "live" else None
    if prompt is None:
        prompt = Prompt(record.prompt_id, record.epoch, {})
    return Admission(group, msgspec.structs.replace(prompt, tries=record.tries) if record.tries else prompt, record.members, record.birth)


def _rollouts(record: GroupRecord) -> tuple[Rollout, ...]:
    finished = record.finished
    return tuple([_stub(finished[member], record) for member in sorted(finished)])


def _stub(event: Finished, record: GroupRecord) -> Rollout:
    """Return a rollout as far as its event tells of it; the rest lies at `reference`."""
    return Rollout(
        group=event.group,
        member=event.member,
        attempt=event.attempt,
        prompt_id=record.prompt_id,
        environment=event.environment,
        reward=record.scores.get(event.member, event.reward),
        rewards=record.parts.get(event.member, {}),
        finish=event.finish,
        turns=event.turns,
        started=event.time - event.seconds,
        finished=event.time,
        engine="",
        metadata={},
        samples=0,
        tokens=event.tokens,
        sampled_tokens=event.sampled_tokens,
        head=event.head,
        tail=event.tail,
        payload=b"",
        source=record.source,
        reference=event.reference,
    )


def ready_group(group: int, record: GroupRecord, found: Prompts, advantages: Advantages) -> ReadyGroup:
    """Return a group of which the journal has a Ready. Its advantages are computed anew, as the train sink does."""
    rollouts = _rollouts(record)
    rewards = np.array([rollout.reward for rollout in rollouts], dtype=np.float64)
    values = checked_advantages(advantages, rewards)
    return ReadyGroup(_admission(group, record, found), rollouts, tuple(values.tolist()), record.ready_version or 0)


def finished_group(group: int, record: GroupRecord, found: Prompts) -> FinishedGroup:
    """Return a group whose members have all ended, to be scored and sunk."""
    return FinishedGroup(_admission(group, record, found), _rollouts(record), tuple(record.lost.values()))


def continued_group(group: int, record: GroupRecord, found: Prompts) -> ContinuedGroup:
    """Return a group of which some members start again."""
    return ContinuedGroup(_admission(group, record, found), _rollouts(record), dict(record.lost))
