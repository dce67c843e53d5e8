"""What workers and other programs send: a named failure or a refusal that is counted, and never nonsense taken in."""

import asyncio
import json
import math
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ingest_service import SAMPLE, Service, body
from mutations import NESTED, damaged, ended, hostile_json, is_one_short_line, junk, mutated
from rollout_strategies import plain_sample, rollout_of

from headway.adapters.workers.child import Child
from headway.errors import WorkerFailed
from headway.formats.offered import InvalidGroup, SampleLimits, decode_group
from headway.formats.rollout import decode_columns, decode_samples
from headway.formats.wire import MAX_FRAME_BYTES, Failed, Finished, FrameReader, Scored, decode_from_worker, decode_to_worker, encode_frame
from headway.types import Failure, Score

ROLLOUT = msgspec.structs.replace(rollout_of([plain_sample([2, 2, 3])]), head=2, tail=3)
FINISHED = msgspec.msgpack.decode(encode_frame(Finished(7, ROLLOUT))[4:])


# ---------------------------------------------------------------------------------------------------------------------------- frames


@settings(max_examples=150, deadline=None)
@given(st.one_of(damaged(encode_frame(Finished(7, ROLLOUT))[4:]), mutated({**FINISHED, "rollout": {**FINISHED["rollout"], "payload": ""}})))
def test_any_frame_is_a_message_or_refused_by_name(wrong):
    frame = wrong if isinstance(wrong, bytes) else _packed(wrong)
    for decode in (decode_from_worker, decode_to_worker):
        message = ended(decode, frame)
        if isinstance(message, WorkerFailed):
            assert is_one_short_line(message)
        elif isinstance(message, Finished):
            rollout = message.rollout
            columns = decode_columns(rollout.payload)
            assert (len(columns.tokens), len(columns.token_ids)) == (rollout.samples, rollout.tokens)
            assert rollout.reward is None or math.isfinite(rollout.reward)


def _packed(message):
    """The message in msgpack, with a payload again where the mutation left its place."""
    rollout = message.get("rollout")
    if isinstance(rollout, dict) and rollout.get("payload") == "":
        rollout["payload"] = ROLLOUT.payload
    try:
        return msgspec.msgpack.encode(message)
    except (OverflowError, RecursionError):
        return b""


LIES: dict[str, Any] = {
    "reward": [math.nan, math.inf, -math.inf],
    "rewards": [{"a": math.nan}],
    "payload": [b"", b"HWS", ROLLOUT.payload[:-1], ROLLOUT.payload + b"x", b"\x00" * 100],
    "samples": [0, 2],
    "tokens": [-1, 10**9],
    "sampled_tokens": [-1, 0, 4],
    "head": [-1, 0, 3, 2**40],
    "tail": [2, 4],
    "turns": [-1],
    "source": ["replay", "external"],
    "started": [math.nan],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in LIES.items() for value in values])
def test_G04_a_rollout_whose_header_lies_is_refused_by_name(name, value):
    frame = encode_frame(Finished(7, msgspec.structs.replace(ROLLOUT, **{name: value})))[4:]
    with pytest.raises(WorkerFailed, match="cannot be"):
        decode_from_worker(frame)
    assert decode_from_worker(encode_frame(Finished(7, ROLLOUT))[4:]) == Finished(7, ROLLOUT)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_G04_a_score_that_is_not_finite_is_refused_by_name(reward):
    for score in (Score(reward), Score(1.0, {"part": reward})):
        with pytest.raises(WorkerFailed, match="not finite"):
            decode_from_worker(encode_frame(Scored(1, [score]))[4:])


def test_a_frame_that_announces_too_much_is_refused_before_it_arrives():
    reader = FrameReader()
    with pytest.raises(WorkerFailed, match="a frame of"):
        reader.feed(struct.pack("<I", MAX_FRAME_BYTES + 1))


def test_what_cannot_be_said_in_msgpack_is_a_named_failure():
    for message in (
        Failed(1, Failure("timeout", "\ud800", retryable=True)),
        Finished(1, msgspec.structs.replace(ROLLOUT, metadata={"a": object()})),
    ):
        with pytest.raises(WorkerFailed, match="cannot be sent"):
            encode_frame(message)


class _Group:
    """As much of a process group as a child that is told nonsense touches."""

    log = "a log"

    def __init__(self):
        self.signals = []

    def signal(self, number):
        self.signals.append(number.name)


@pytest.mark.parametrize("data", [b"\xff" * 8, struct.pack("<I", 3) + b"abc", encode_frame(Finished(1, ROLLOUT))[:4] + b"\x00" * 900])
async def test_a_worker_that_speaks_nonsense_is_killed_and_nothing_else_happens(data):
    group: Any = _Group()
    child = Child("worker-0", group)
    child.calls[1] = waiting = asyncio.get_running_loop().create_future()
    child.data_received(data)
    assert group.signals == ["SIGKILL"]
    assert not waiting.done()  # it ends as worker_died, by whoever supervises the process


# ------------------------------------------------------------------------------------------------------------------------ posted groups

LIMITS = SampleLimits(tokens=100, vocabulary=50)


@settings(max_examples=200, deadline=None)
@given(hostile_json(body()))
def test_any_posted_body_is_a_group_that_can_be_trained_on_or_refused_in_one_line(data):
    try:
        group = decode_group(data, source="external", limits=LIMITS, now=1.5)
    except InvalidGroup as error:
        refused = error
        group = None
    if group is None:
        assert is_one_short_line(refused)
        return
    for rollout in group.rollouts:
        assert rollout.reward is not None
        assert math.isfinite(rollout.reward)
        for sample in decode_samples(rollout.payload):
            assert 0 <= sample.token_ids.min() <= sample.token_ids.max() < 50


@settings(max_examples=100, deadline=None)
@given(mutated(body()) | junk)
def test_any_msgpack_body_is_a_group_or_refused_in_one_line(value):
    try:
        data = msgspec.msgpack.encode(value)
        decode_group(data, source="external", limits=LIMITS, now=1.5, encoding="msgpack")
    except (InvalidGroup, OverflowError, RecursionError) as error:
        refused = error
    else:
        return
    assert not isinstance(refused, InvalidGroup) or is_one_short_line(refused)


@pytest.mark.parametrize("reward", ["NaN", "Infinity", "1e400", '"0.5"', "true", "null", "[1]"])
def test_G04_a_posted_reward_that_is_no_finite_number_is_refused(reward):
    sample = json.dumps(SAMPLE)
    data = f'{{"name": "a", "rollouts": [{{"reward": {reward}, "samples": [{sample}]}}]}}'.encode()
    with pytest.raises(InvalidGroup) as refused:
        decode_group(data, source="external", limits=LIMITS, now=1.5)
    assert is_one_short_line(refused.value)


WRONG = [b"", b"\x00", b"null", b"[]", NESTED.encode(), b'{"name": "a", "rollouts": [' + NESTED.encode(), b"\xff\xfe", b"x" * 4097]


async def test_every_refused_post_is_answered_in_4xx_and_counted(tmp_path):
    service = Service(tmp_path)
    async with service.listening():
        for data in WRONG:
            for content_type in ("application/json", "application/msgpack"):
                status, answer, _ = await service.post(data=data, content_type=content_type)
                assert status in {400, 413}
                assert is_one_short_line(answer["error"])
        counts = service.ingest.counts
        assert counts["ingest_submitted"] == sum(counts["ingest_refused"].values()) == 2 * len(WRONG)
        assert service.taken == []
        assert (await service.post(body()))[0] == 202
