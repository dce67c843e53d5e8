"""Groups that no engine of this run has written: what a request or a file offers, read strictly, until nothing in it can harm the run.

    {"name": "prompt-17", "environment": "guess", "rollouts": [
        {"reward": 1.0, "rewards": {}, "finish": "stop", "turns": 1, "metadata": {}, "samples": [
            {"token_ids": [..], "sampled_mask": [..], "loss_mask": [..], "logprobs": [..]}]}]}

The lists of a sample have one length; `loss_mask` may be left out (then it is `sampled_mask`). What a trainer would stumble over is refused
here, with a line that names the field: a run does not end because of what somebody sends it. Its tokens have no version of this run: their
stamps are `UNKNOWN_VERSION`, and they are outside of the staleness bound and its statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from headway.formats.rollout import DEFAULT_POLICY, UNKNOWN_VERSION, decode_columns, encode_samples
from headway.types import Finish, Rollout, Sample, Source

DEEPEST_METADATA = 32  # levels: what is stored must be readable by parsers that recurse
UNPLACED = -1  # the group's id, until it has a place
_LONGEST_MESSAGE = 300

Encoding = Literal["json", "msgpack"]


class InvalidGroup(ValueError):
    """What was offered cannot be trained on; the message is one line that names the field."""


class SampleLimits(msgspec.Struct, frozen=True):
    """What fits the model and its trainer: the longest sample in tokens, and the size of the vocabulary; 0: not known."""

    tokens: int = 0
    vocabulary: int = 0


@dataclass(frozen=True, slots=True)
class OfferedGroup:
    """One prompt's rollouts, checked; `name` is its sender's. Their group is `UNPLACED` until the run has a place for them."""

    name: str
    source: Source
    rollouts: tuple[Rollout, ...]


class _Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token_ids: Annotated[list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(min_length=1)]
    sampled_mask: list[bool]
    logprobs: list[float]
    loss_mask: list[bool] | None = None


class _Rollout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reward: float
    samples: Annotated[list[_Sample], Meta(min_length=1)]
    rewards: dict[str, float] = {}
    finish: Finish = "stop"
    turns: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 1
    metadata: dict[str, Any] = {}


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=1000)]
    rollouts: Annotated[list[msgspec.Raw], Meta(min_length=1)]
    environment: Annotated[str, Meta(max_length=1000)] = ""


_groups = {"json": msgspec.json.Decoder(_Group).decode, "msgpack": msgspec.msgpack.Decoder(_Group).decode}
_rollouts = {"json": msgspec.json.Decoder(_Rollout).decode, "msgpack": msgspec.msgpack.Decoder(_Rollout).decode}
_NO_GROUP = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)


def decode_group(data: bytes | bytearray, *, source: Source, limits: SampleLimits, now: float, encoding: Encoding = "json") -> OfferedGroup:
    """Read one group; its rollouts count as begun and ended `now` (Unix seconds). Raises InvalidGroup."""
    steps = decoding(data, source=source, limits=limits, now=now, encoding=encoding)
    return next(group for group in steps if group is not None)


def decoding(
    data: bytes | bytearray, *, source: Source, limits: SampleLimits, now: float, encoding: Encoding = "json"
) -> Iterator[OfferedGroup | None]:
    """Read one group as `decode_group` does, a rollout at a time: yield None after each, and the group at the end. Raises InvalidGroup."""
    try:
        group = _groups[encoding](data)
    except _NO_GROUP as error:
        raise InvalidGroup(_line(str(error))) from error
    rollouts = []
    for member, raw in enumerate(group.rollouts):
        where = f"rollouts[{member}]"
        try:
            offered = _rollouts[encoding](raw)
        except _NO_GROUP as error:
            what, at, path = str(error).partition(" - at `$")
            raise InvalidGroup(_line(f"{what}{at}.{where}{path}" if at else f"{where}: {what}")) from error
        samples = [_sample(f"{where}.samples[{i}]", sample, limits) for i, sample in enumerate(offered.samples)]
        header: dict[str, Any] = {
            "member": member,
            "prompt_id": group.name,
            "environment": group.environment,
            "reward": offered.reward,
            "rewards": offered.rewards,
            "finish": offered.finish,
            "turns": offered.turns,
            "metadata": plain_metadata(where, offered.metadata),
            "started": now,
            "finished": now,
        }
        rollouts.append(offered_rollout(where, samples, source=source, **header))
        yield None
    yield offered_group(group.name, source, rollouts)


def offered_group(name: str, source: Source, rollouts: Sequence[Rollout]) -> OfferedGroup:
    """Return checked rollouts as a group. Raises InvalidGroup when none of them could be trained on."""
    if not any(decode_columns(rollout.payload).loss.any() for rollout in rollouts):
        raise InvalidGroup("rollouts: no token of them is in the loss: nothing could be trained on")
    return OfferedGroup(name, source, tuple(rollouts))


def offered_rollout(where: str, samples: Sequence[Sample], *, engine: str = "", **header: Any) -> Rollout:
    """Return checked samples with the header that the run will keep. Raises InvalidGroup."""
    reward, rewards = header["reward"], header["rewards"]
    if reward is None or not math.isfinite(reward):
        raise InvalidGroup(f"{where}.reward is {reward}: it must be a finite number")
    for name, value in rewards.items():
        if not math.isfinite(value):
            raise InvalidGroup(_line(f"{where}.rewards: {name!r} is {value}: it must be a finite number"))
    return Rollout(
        group=UNPLACED,
        attempt=0,
        engine=engine,
        samples=len(samples),
        tokens=sum(len(sample.token_ids) for sample in samples),
        sampled_tokens=sum(int(sample.sampled_mask.sum()) for sample in samples),
        head=UNKNOWN_VERSION,
        tail=UNKNOWN_VERSION,
        payload=encode_samples(samples),
        **header,
    )


def _sample(where: str, sample: _Sample, limits: SampleLimits) -> Sample:
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is told by its field
        logprobs = np.array(sample.logprobs, np.float32)
    sampled = np.array(sample.sampled_mask, np.bool_)
    return checked_sample(
        where,
        token_ids=np.array(sample.token_ids, np.int32),
        sampled_mask=sampled,
        loss_mask=sampled if sample.loss_mask is None else np.array(sample.loss_mask, np.bool_),
        logprobs=logprobs,
        limits=limits,
    )


def checked_sample(
    where: str,
    *,
    token_ids: npt.NDArray[np.int32],
    sampled_mask: npt.NDArray[np.bool_],
    loss_mask: npt.NDArray[np.bool_],
    logprobs: npt.NDArray[np.float32],
    limits: SampleLimits,
    policy_id: str = DEFAULT_POLICY,
) -> Sample:
    """Return a sample that a trainer can take, log-probabilities 0 where not sampled. Raises InvalidGroup."""
    n = len(token_ids)
    for name, column in (("sampled_mask", sampled_mask), ("loss_mask", loss_mask), ("logprobs", logprobs)):
        if len(column) != n:
            raise InvalidGroup(f"{where}.{name} has {len(column)} entries and token_ids {n}: they must be as many")
    if limits.tokens and n > limits.tokens:
        raise InvalidGroup(f"{where}.token_ids holds {n} tokens: this run trains on samples of at most {limits.tokens}")
    if n and token_ids.min() < 0:
        raise InvalidGroup(f"{where}.token_ids holds {token_ids.min()}: ids are 0 or more")
    if limits.vocabulary and n and token_ids.max() >= limits.vocabulary:
        raise InvalidGroup(f"{where}.token_ids holds {token_ids.max()}: the model's ids are 0 to {limits.vocabulary - 1}")
    if (loss_mask > sampled_mask).any():
        raise InvalidGroup(f"{where}.loss_mask holds a token that sampled_mask does not: only what was sampled can be in the loss")
    if loss_mask[:1].any():
        raise InvalidGroup(f"{where}.loss_mask begins with true: nothing stands before the first token to predict it from")
    if not np.isfinite(logprobs[sampled_mask]).all():
        raise InvalidGroup(f"{where}.logprobs holds a value that is not finite in float32")
    spans = 1 if sampled_mask.any() else 0
    return Sample(
        token_ids=token_ids,
        sampled_mask=sampled_mask,
        loss_mask=loss_mask,
        logprobs=np.where(sampled_mask, logprobs, np.float32(0)),
        span_start=np.zeros(spans, np.int32),
        span_version=np.full(spans, UNKNOWN_VERSION, np.int32),
        policy_id=policy_id,
    )


def plain_metadata(where: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata as the journal and the record can hold it: JSON's values, not too deep. Raises InvalidGroup."""
    if not metadata:
        return {}
    try:
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(metadata), type=dict[str, Any])
        msgspec.msgpack.encode(plain)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidGroup(_line(f"{where}.metadata cannot be stored: {error}: use texts, numbers, lists and dicts")) from error
    level: list[Any] = [plain]
    for _ in range(DEEPEST_METADATA):
        inner = [value.values() if isinstance(value, dict) else value for value in level]
        level = [child for values in inner for child in values if isinstance(child, (dict, list))]
    if level:
        raise InvalidGroup(f"{where}.metadata is nested more than {DEEPEST_METADATA} levels deep")
    return plain


def _line(message: str) -> str:
    """Return a message as one short line: it may quote what was sent."""
    line = " ".join(message.split())
    return line if len(line) <= _LONGEST_MESSAGE else line[:_LONGEST_MESSAGE] + "..."
