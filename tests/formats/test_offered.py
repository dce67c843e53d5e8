"""What is offered is read strictly: what passes can be trained on and stored, and what does not is told by its field, in one line."""

import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.formats.batch import assemble
from headway.formats.offered import DEEPEST_METADATA, UNPLACED, InvalidGroup, SampleLimits, decode_group
from headway.formats.rollout import UNKNOWN_VERSION, decode_rollout, decode_samples, encode_rollout
from headway.types import Admission, Batch, Prompt, ReadyGroup

LIMITS = SampleLimits(tokens=6, vocabulary=100)


def sample(**changes):
    return {
        "token_ids": [1, 2, 3, 4],
        "sampled_mask": [False, False, True, True],
        "loss_mask": [False, False, False, True],
        "logprobs": [0.0, 0.0, -0.5, -1.25],
    } | changes


def body(rollout=None, samples=None, **changes):
    one = {"reward": 1.0, "samples": [sample()] if samples is None else samples}
    return {"name": "prompt-17", "environment": "guess", "rollouts": [one, one | (rollout or {})]} | changes


def decode(value, *, limits=LIMITS, **more):
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return decode_group(data, source="external", limits=limits, now=12.5, **more)


def refusal(value, **more):
    with pytest.raises(InvalidGroup) as refused:
        decode(value, **more)
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


def test_a_group_becomes_rollouts_that_wait_for_their_place():
    more = {"rewards": {"style": 0.5}, "finish": "length", "turns": 3, "metadata": {"seed": [1, None, {"a": "b"}]}}
    group = decode(body(more))
    first, second = group.rollouts
    assert (group.name, group.source) == ("prompt-17", "external")
    assert [(one.group, one.member, one.attempt, one.source) for one in group.rollouts] == [(UNPLACED, n, 0, "external") for n in (0, 1)]
    assert (first.prompt_id, first.environment, first.reward, first.rewards) == ("prompt-17", "guess", 1.0, {})
    assert (first.finish, first.turns, first.metadata, first.engine) == ("stop", 1, {}, "")
    assert (first.started, first.finished) == (12.5, 12.5)
    assert (first.samples, first.tokens, first.sampled_tokens, first.head, first.tail) == (1, 4, 2, -1, -1)
    assert (second.rewards, second.finish, second.turns, second.metadata) == tuple(more.values())
    (opened,) = decode_samples(first.payload)
    assert opened.span_start.tolist() == [0]
    assert opened.span_version.tolist() == [UNKNOWN_VERSION]


def test_msgpack_says_the_same_as_json():
    value = body({"metadata": {"a": [1, 2.5]}})
    assert decode(msgspec.msgpack.encode(value), encoding="msgpack") == decode(value)


def test_a_loss_mask_that_is_left_out_is_the_sampled_mask():
    without = sample()
    del without["loss_mask"]
    (opened,) = decode_samples(decode(body(samples=[without])).rollouts[0].payload)
    assert opened.loss_mask.tolist() == [False, False, True, True]


def test_log_probabilities_of_tokens_that_were_not_sampled_do_not_matter():
    (opened,) = decode_samples(decode(body(samples=[sample(logprobs=[7.0, 1e300, -0.5, -1.25])])).rollouts[0].payload)
    assert opened.logprobs.tolist() == [0.0, 0.0, -0.5, -1.25]


SAMPLE = "rollouts[0].samples[0]"


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (body(samples=[sample(logprobs=[0.0, -0.5, -1.25])]), f"{SAMPLE}.logprobs has 3 entries and token_ids 4"),
        (body(samples=[sample(sampled_mask=[True])]), f"{SAMPLE}.sampled_mask has 1 entries"),
        (body(samples=[sample(loss_mask=[False] * 5)]), f"{SAMPLE}.loss_mask has 5 entries"),
        (body(samples=[sample(), sample(loss_mask=[False, True, True, True])]), "rollouts[0].samples[1].loss_mask holds a token that"),
        (body(samples=[sample(logprobs=[0.0, 0.0, -0.5, 1e39])]), f"{SAMPLE}.logprobs holds a value that is not finite in float32"),
        (body(samples=[sample(token_ids=[1, 2, 3, 100])]), f"{SAMPLE}.token_ids holds 100: the model's ids are 0 to 99"),
        (body(samples=[sample(token_ids=[1, 2, 3, -4])]), f"{SAMPLE}.token_ids[3]"),
        (body(samples=[sample(token_ids=[1, 2, 3, 2**31])]), f"{SAMPLE}.token_ids[3]"),
        (body(samples=[sample(token_ids=[1, 2, 3, 4.5])]), f"{SAMPLE}.token_ids[3]"),
        (body(samples=[sample(token_ids=[], sampled_mask=[], loss_mask=[], logprobs=[])]), "token_ids"),
        (body(samples=[sample(sampled_mask=[0, 0, 1, 1])]), f"{SAMPLE}.sampled_mask[0]"),
        (body(samples=[sample(logprobs=[None, None, -0.5, -0.5])]), f"{SAMPLE}.logprobs[0]"),
        (body(samples=[sample(version=3)]), "unknown field `version`"),
        (body(samples=[{"token_ids": [1]}]), "missing required field `sampled_mask`"),
        (body(samples=[]), "samples"),
        (
            body(samples=[{k: [v] * 7 for k, v in {"token_ids": 1, "sampled_mask": False, "logprobs": 0.0}.items()}]),
            f"{SAMPLE}.token_ids holds 7 tokens: this run trains on samples of at most 6",
        ),
        (
            body(samples=[sample(sampled_mask=[True] * 4, loss_mask=[True] * 4)]),
            f"{SAMPLE}.loss_mask begins with true: nothing stands before the first token",
        ),
        (body(samples=[sample(loss_mask=[False] * 4)]), "rollouts: no token of them is in the loss"),
        (body({"reward": None}), "reward"),
        (body({"reward": "1"}), "reward"),
        (body({"reward": True}), "reward"),
        (body({"rewards": {"style": None}}), "rewards"),
        (body({"finish": "bored\nout of my mind"}), "finish"),
        (body({"turns": -1}), "turns"),
        (body({"metadata": []}), "metadata"),
        (body({"metadata": {"a": 2**70}}), "rollouts[1].metadata cannot be stored"),
        (body(rollouts=[]), "rollouts"),
        (body(name=""), "name"),
        (body(name="x" * 1001), "name"),
        (body(name=None), "name"),
        ({"rollouts": [body()["rollouts"][0]]}, "name"),
        ([], "Expected `object`"),
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"\xff\xfe", "malformed"),
        (b'{"name": "\xff"}', "Invalid UTF-8"),
        (b'{"name": "a", "rollouts": [{"reward": NaN}]}', "malformed"),
        (b'{"name": "a", "rollouts": [{"reward": 1e999}]}', "reward"),
        (b'{"name": "a", "rollouts": [{"reward": 1' + b"0" * 400 + b"}]}", "reward"),
        (b"[" * 200_000, "Expected `object`"),
        (b'{"name": "a", "rollouts": [{"metadata": {"a": ' + b"[" * 200_000, "recursion"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_cannot_be_trained_on_is_refused_by_its_field(value, field):
    assert field in refusal(value)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["reward", "rewards", "logprobs"])
def test_numbers_that_json_has_no_word_for_are_refused_in_msgpack_too(place, number):
    changes = {"reward": {"reward": number}, "rewards": {"rewards": {"a": number}}, "logprobs": {"samples": [_with_logprob(number)]}}
    assert place in refusal(msgspec.msgpack.encode(body(changes[place])), encoding="msgpack")


def _with_logprob(number):
    return sample(logprobs=[0.0, 0.0, number, -1.0])


@pytest.mark.parametrize(
    "metadata",
    [
        b"\x81\xa1a\xc7\x01\x07a",  # an extension type
        b"\x81\xa1a\x81\x91\x01\x01",  # a key that is a list
        b"\x81\xa1a\xcf" + b"\xff" * 8,  # the largest integer there is
    ],
)
def test_what_msgpack_can_say_and_the_record_cannot_hold_is_refused_or_made_plain(metadata):
    data = msgspec.msgpack.encode(body({"metadata": "HERE"})).replace(b"\xa4HERE", metadata)
    try:
        group = decode(data, encoding="msgpack")
    except InvalidGroup:
        assert "rollouts[1].metadata cannot be stored" in refusal(data, encoding="msgpack")
    else:
        assert decode_rollout(encode_rollout(group.rollouts[1])) == group.rollouts[1]


def test_metadata_is_kept_as_deep_as_any_parser_goes_and_no_deeper():
    def nested(levels):
        value: Any = 1
        for _ in range(levels - 1):
            value = [value]
        return body({"metadata": {"a": value}})

    assert decode(nested(DEEPEST_METADATA)).rollouts[1].metadata
    assert f"rollouts[1].metadata is nested more than {DEEPEST_METADATA} levels deep" in refusal(nested(DEEPEST_METADATA + 1))


numbers = st.floats(-(2.0**99), 2.0**99, width=32)
texts = st.text(max_size=8)


@st.composite
def sample_bodies(draw):
    n = draw(st.integers(2, 8))
    sampled = [False, *draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1))]
    loss = [here and draw(st.booleans()) for here in sampled]
    return {
        "token_ids": draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)),
        "sampled_mask": sampled,
        "logprobs": [draw(numbers) if here else 0.0 for here in sampled],
        **({"loss_mask": loss} if draw(st.booleans()) else {}),
    }


rollout_bodies = st.fixed_dictionaries(
    {"reward": numbers, "samples": st.lists(sample_bodies(), min_size=1, max_size=3)},
    optional={
        "rewards": st.dictionaries(texts, numbers, max_size=2),
        "finish": st.sampled_from(["stop", "length", "truncated"]),
        "turns": st.integers(0, 9),
        "metadata": st.dictionaries(texts, st.recursive(st.none() | st.integers(-(2**63), 2**63 - 1) | texts, st.lists), max_size=2),
    },
)
group_bodies = st.fixed_dictionaries(
    {"name": st.text(min_size=1, max_size=20), "rollouts": st.lists(rollout_bodies, min_size=1, max_size=3)},
    optional={"environment": texts},
)


def _in_loss(one):
    return one.get("loss_mask", one["sampled_mask"])


@given(group_bodies, st.sampled_from(["json", "msgpack"]))
def test_what_passes_comes_out_again_and_can_be_stored_and_batched(value, encoding):
    data = {"json": msgspec.json, "msgpack": msgspec.msgpack}[encoding].encode(value)
    if not any(any(_in_loss(one)) for rollout in value["rollouts"] for one in rollout["samples"]):
        assert "in the loss" in refusal(data, encoding=encoding, limits=SampleLimits())
        return
    group = decode(data, encoding=encoding, limits=SampleLimits())
    assert group.name == value["name"]
    for sent, rollout in zip(value["rollouts"], group.rollouts, strict=True):
        for one, opened in zip(sent["samples"], decode_samples(rollout.payload), strict=True):
            assert opened.token_ids.tolist() == one["token_ids"]
            assert opened.sampled_mask.tolist() == one["sampled_mask"]
            assert opened.loss_mask.tolist() == _in_loss(one)
            assert opened.logprobs.tolist() == one["logprobs"]
            assert set(opened.span_version.tolist()) <= {UNKNOWN_VERSION}
        kept = {name: getattr(rollout, name) for name in sent if name != "samples"}
        assert kept == {name: sent[name] for name in kept}
        assert rollout.tokens == sum(len(one["token_ids"]) for one in sent["samples"])
        assert decode_rollout(encode_rollout(rollout)) == rollout
    placed = tuple(msgspec.structs.replace(rollout, group=3) for rollout in group.rollouts)
    ready = ReadyGroup(Admission(3, Prompt(group.name, 0, {}), len(placed), -1), placed, (1.0,) * len(placed))
    assembled = assemble(Batch(9, (ready,), 2, "mask", 1.0))
    in_loss = sum(sum(_in_loss(one)) for sent in value["rollouts"] for one in sent["samples"])
    assert int(np.count_nonzero(assembled.arrays["loss_mask"])) == in_loss
    assert set(assembled.arrays["versions"].tolist()) == {-1}


@given(st.binary(max_size=200), st.sampled_from(["json", "msgpack"]))
def test_noise_is_refused(data, encoding):
    refusal(data, encoding=encoding)
