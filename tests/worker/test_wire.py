"""The worker wire: frames however they are cut, and every message as it was."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import WorkerFailed
from headway.formats.rollout import encode_samples
from headway.formats.wire import (
    Alive,
    Attempt,
    Cancel,
    Drain,
    Failed,
    Finished,
    FrameReader,
    FromWorker,
    GiveUp,
    Hello,
    Move,
    Moved,
    ScoreCall,
    Scored,
    Setup,
    ToWorker,
    WorkerSpec,
    decode_from_worker,
    decode_to_worker,
    encode_frame,
)
from headway.types import AttemptRequest, EngineAddress, Failure, Prompt, Rollout, Sample, SamplingParams, Score, ScoreRequest

PROMPT = Prompt("p", 1, {"question": "\u2028é", "numbers": [1, 2.5, None]})
SAMPLED = np.arange(600) >= 400
SAMPLE = Sample(
    token_ids=np.arange(600, dtype=np.int32),
    sampled_mask=SAMPLED,
    loss_mask=SAMPLED,
    logprobs=np.where(SAMPLED, np.float32(-1), np.float32(0)),
    span_start=np.array([0, 50], np.int32),
    span_version=np.array([2, 3], np.int32),
)
ROLLOUT = Rollout(
    3, 1, 0, "p", "guess", 0.5, {"a": 1.0}, "stop", 2, 1.0, 2.0, "http://x", {"k": [1]}, 1, 600, 200, 2, 3, payload=encode_samples([SAMPLE])
)
TO_WORKER: list[ToWorker] = [
    Setup(WorkerSpec(entry="m:a", base="/b", model="/m", lineage="abc")),
    Attempt(7, AttemptRequest(3, 1, 0, PROMPT, "eval", "http://x", 2**63 - 1, SamplingParams(), 64)),
    ScoreCall(8, ScoreRequest(3, PROMPT, (ROLLOUT,))),
    Attempt(9, AttemptRequest(3, 1, 0, PROMPT, "train", "http://x", 1, SamplingParams(), 64, "sglang", lora=True), moves=True),
    Cancel(7),
    Moved(9, EngineAddress("http://[::1]:8", "sglang")),
    Moved(9, None),
    GiveUp(9, 2),
    Drain(),
]
FROM_WORKER: list[FromWorker] = [
    Hello("error", "detail"),
    Finished(7, ROLLOUT),
    Failed(7, Failure("timeout", "x", retryable=True, sampled_tokens=3)),
    Scored(8, [Score(None), Score(1.0, {"a": 2.0})]),
    Move(9, EngineAddress("http://x")),
    Alive(),
]


@given(st.lists(st.integers(1, 400), max_size=60))
def test_messages_survive_however_the_stream_is_cut(cuts):
    stream = b"".join(encode_frame(message) for message in FROM_WORKER)
    reader = FrameReader()
    bodies = []
    for cut in cuts:
        bodies += reader.feed(stream[:cut])
        stream = stream[cut:]
    bodies += reader.feed(stream)
    assert [decode_from_worker(body) for body in bodies] == FROM_WORKER


def test_what_an_orchestrator_says_arrives_as_it_was():
    reader = FrameReader()
    assert [decode_to_worker(body) for message in TO_WORKER for body in reader.feed(encode_frame(message))] == TO_WORKER


def test_a_frame_that_is_too_large_is_refused_before_it_is_read():
    with pytest.raises(WorkerFailed, match="is the other side headway"):
        FrameReader().feed(b"GET / HTTP/1.1\r\n")


@pytest.mark.parametrize("body", [b"", b"\xc0", b"\x81\xa4type\xa5other"])
def test_a_message_that_cannot_be_read_is_a_named_error(body):
    with pytest.raises(WorkerFailed):
        decode_from_worker(body)
    with pytest.raises(WorkerFailed):
        decode_to_worker(body)
