"""The worker wire: what an orchestrator and its rollout workers say to each other, as length-prefixed msgpack frames.

A frame is a 4-byte little-endian length and as many bytes of msgpack: a map whose `type` names the message. Orchestrator to worker:
`setup` (first, once), `attempt`, `score`, `cancel`, `moved`, `giveup`, `drain`. Worker to orchestrator: `hello` (the answer to `setup`),
`finished`, `failed`, `scored`, `move`, `alive`. Each call has a number of the orchestrator's choosing; every call is answered exactly once,
a cancelled one by `failed`. An attempt whose engine fails may ask for a `move`, one at a time; `moved` answers, unless the call is over.
The payload of a rollout passes through as bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headway.errors import StorageError, WorkerFailed
from headway.formats.bounded import brief
from headway.formats.rollout import decode_columns
from headway.settings import EnvironmentSection
from headway.types import AttemptRequest, EngineAddress, Failure, Rollout, Score, ScoreRequest

MAX_FRAME_BYTES = 512 * 1024 * 1024

_LENGTH = struct.Struct("<I")
_MOST = 2**31 - 1


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker runs. `base`: directory of the config file, where the user's modules are; `model`: a directory with a tokenizer."""

    entry: str
    score: str = ""
    name: str = ""
    base: str
    model: str
    lineage: str
    cleanup_seconds: float = 10.0
    truncated_reward: float = 0.0

    @classmethod
    def of(cls, section: EnvironmentSection, *, base: Path, model: Path, lineage: str) -> WorkerSpec:
        """Return what a config's environment section asks for."""
        return cls(
            entry=section.entry,
            score=section.score,
            name=section.name,
            base=str(base),
            model=str(model),
            lineage=lineage,
            cleanup_seconds=section.cleanup_seconds,
            truncated_reward=section.truncated_reward,
        )


class Message(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower):
    """Base of all messages."""


class Setup(Message, frozen=True):
    """Import this and be ready to run it."""

    spec: WorkerSpec


class Attempt(Message, frozen=True):
    """Attempt a prompt. `moves`: it may ask for another engine."""

    call: int
    request: AttemptRequest
    moves: bool = False


class ScoreCall(Message, frozen=True, tag="score"):
    """Score rollouts."""

    call: int
    request: ScoreRequest


class Cancel(Message, frozen=True):
    """Nobody waits for this call any more."""

    call: int


class Moved(Message, frozen=True):
    """The attempt goes on at `engine`; None: it stays, and its engine's failure counts."""

    call: int
    engine: EngineAddress | None


class GiveUp(Message, frozen=True):
    """The engine hangs at which the attempt is after `moves` moves: what it was asked there is given up, and a move is asked for."""

    call: int
    moves: int


class Drain(Message, frozen=True):
    """Cancel what runs, let it clean up, and end."""


class Hello(Message, frozen=True):
    """The worker is ready, or cannot be: `error` says why in one line, `detail` is the user's traceback."""

    error: str = ""
    detail: str = ""


class Finished(Message, frozen=True):
    """An attempt brought a rollout."""

    call: int
    rollout: Rollout


class Failed(Message, frozen=True):
    """A call brought nothing."""

    call: int
    failure: Failure


class Scored(Message, frozen=True):
    """A scorer's verdicts, in the order of the rollouts."""

    call: int
    scores: Sequence[Score]


class Move(Message, frozen=True):
    """The attempt's engine failed: where does it go on?"""

    call: int
    failed: EngineAddress


class Alive(Message, frozen=True):
    """Sent every second: the worker's loop turns."""


ToWorker = Setup | Attempt | ScoreCall | Cancel | Moved | GiveUp | Drain
FromWorker = Hello | Finished | Failed | Scored | Move | Alive

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


def encode_frame(message: ToWorker | FromWorker) -> bytes:
    """Return a message as a frame. Raises `WorkerFailed` for one larger than `MAX_FRAME_BYTES`, and for what cannot be said in msgpack."""
    frame = bytearray(_LENGTH.size)
    try:
        _encoder.encode_into(message, frame, _LENGTH.size)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:  # ValueError: also texts that are none (half a surrogate pair)
        raise WorkerFailed(f"a {type(message).__name__} message cannot be sent: {error}") from error
    length = len(frame) - _LENGTH.size
    if length > MAX_FRAME_BYTES:
        raise WorkerFailed(f"a {type(message).__name__} message has {length} bytes: at most {MAX_FRAME_BYTES} fit into a frame")
    _LENGTH.pack_into(frame, 0, length)
    return bytes(frame)


class FrameReader:
    """Cuts a byte stream into frames, however it arrives. No I/O."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take more bytes; return the bodies of the frames that are whole now. Raises `WorkerFailed` for a frame that is too large."""
        buffer = self._buffer
        buffer += data
        bodies: list[bytes] = []
        at = 0
        while len(buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, at)
            if length > MAX_FRAME_BYTES:
                raise WorkerFailed(
                    f"a frame of {length} bytes was announced: at most {MAX_FRAME_BYTES} are read (is the other side headway?)"
                )
            end = at + _LENGTH.size + length
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[at + _LENGTH.size : end]))
            at = end
        del buffer[:at]
        return bodies


def decode_to_worker(body: bytes) -> ToWorker:
    """Decode what an orchestrator said. Raises `WorkerFailed`."""
    try:
        return _to_worker.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WorkerFailed(f"a message to a worker cannot be read: {brief(error)}") from error


def decode_from_worker(body: bytes) -> FromWorker:
    """Decode what a worker said, and check that what it says of a rollout can be. Raises `WorkerFailed`."""
    try:
        message: FromWorker = _from_worker.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WorkerFailed(f"a message from a worker cannot be read: {brief(error)}") from error
    if isinstance(message, Finished) and (wrong := _wrong(message.rollout)):
        raise WorkerFailed(f"a worker sent a rollout that cannot be: {wrong}")
    if isinstance(message, Scored):
        numbers = [number for score in message.scores for number in (score.reward, *score.rewards.values()) if number is not None]
        if not all(map(math.isfinite, numbers)):
            raise WorkerFailed("a worker sent a score that is not finite")
    return message


def _wrong(rollout: Rollout) -> str:
    """Return what keeps a rollout from being one; empty: nothing that can be seen without looking at each token."""
    numbers = [number for number in (rollout.reward, *rollout.rewards.values(), rollout.started, rollout.finished) if number is not None]
    if not all(map(math.isfinite, numbers)):
        return "a reward or a time is not finite"
    if rollout.source != "live" or rollout.reference is not None:
        return "it claims to be of another origin"
    try:
        columns = decode_columns(rollout.payload)
    except StorageError as error:
        return str(error)
    counted = (len(columns.tokens), len(columns.token_ids), int(columns.sampled.sum()))
    if counted != (rollout.samples, rollout.tokens, rollout.sampled_tokens):
        return "its header counts other samples or tokens than it holds"
    oldest, newest = int(columns.span_version.min(initial=_MOST)), int(columns.span_version.max(initial=-1))
    if not columns.sampled.any() or (oldest, newest) != (rollout.head, rollout.tail) or oldest < 0 or rollout.turns < 0:
        return "its header names other versions or turns than it holds"
    return ""
