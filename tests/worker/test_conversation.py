"""Token histories: masks, stamps, append-only ids, chat messages."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from scripted_engine import Status, Tokens, logprob, replies
from small_models import AB, BOS, EOS, IM_END, ids_of, write_tokenizer

from headway import Outcome, RolloutTruncated
from headway.formats.rollout import decode_samples
from headway.types import Failure, Rollout, SamplingParams

NEWLINE = ids_of("\n")


async def test_F08_the_loss_mask_is_one_exactly_on_sampled_ids(bench):
    async def environment(prompt, policy):
        game = await policy.open("<bos>go")
        for seen in ("xy", [7, 8], "z"):
            await game.generate()
            game.observe(seen)
        await game.generate()
        game.observe("never sent")
        return Outcome(1.0)

    script = replies(
        Tokens([20, 21], spans=[("abc-3", 0, 2)]),
        Tokens([22], spans=[("abc-3", 0, 1)]),
        Tokens([23, 24, 25], spans=[("abc-4", 0, 1), ("abc-5", 1, 3)]),
        Tokens([26], spans=[("abc-5", 0, 1)]),
    )
    async with bench(environment, script) as b:
        rollout = await b.attempt()
    assert isinstance(rollout, Rollout)
    (sample,) = decode_samples(rollout.payload)
    expected = [BOS, *ids_of("go"), 20, 21, *ids_of("xy"), 22, 7, 8, 23, 24, 25, *ids_of("z"), 26]
    sampled = [token in range(20, 27) for token in expected]
    assert sample.token_ids.tolist() == expected
    assert sample.sampled_mask.tolist() == sample.loss_mask.tolist() == sampled
    assert sample.logprobs[sample.sampled_mask].tolist() == [logprob(i) for i in (0, 1, 0, 0, 1, 2, 0)]
    assert not sample.logprobs[~sample.sampled_mask].any()
    assert sample.span_start.tolist() == [0, 3, 4]
    assert sample.span_version.tolist() == [3, 4, 5]
    assert (rollout.head, rollout.tail, rollout.tokens, rollout.sampled_tokens, rollout.turns) == (3, 5, len(expected), 7, 4)


async def test_F01_what_was_sampled_is_never_tokenised_again(bench):
    a, b_ = ids_of("a")[0], ids_of("b")[0]

    async def environment(prompt, policy):
        talk = await policy.open("x")
        for _ in range(4):
            turn = await talk.generate()
            assert turn.text == "ab"
            talk.observe("ab")
        return Outcome(1.0)

    async with bench(environment, Tokens([a, b_])) as b:
        assert isinstance(await b.attempt(), Rollout)
    sent = [r["token_ids"] for r in b.engine.requests]
    assert sent[3] == [*ids_of("x"), *([a, b_, AB] * 3)]
    for earlier, later in pairwise(sent):
        assert later[: len(earlier) + 2] == [*earlier, a, b_]


async def test_F07_an_abort_extends_ids_masks_logprobs_and_stamps_alike(bench):
    async def environment(prompt, policy):
        talk = await policy.open([5])
        await talk.generate(max_tokens=10)
        return Outcome(1.0)

    script = replies(
        Tokens([10, 11], finish="abort"), Tokens([12], finish="abort", spans=[("abc-4", 0, 1)]), Tokens([13], spans=[("abc-5", 0, 1)])
    )
    async with bench(environment, script) as b:
        (sample,) = decode_samples((await b.attempt()).payload)
    assert sample.token_ids.tolist() == [5, 10, 11, 12, 13]
    assert sample.loss_mask.tolist() == [False, True, True, True, True]
    assert len(sample.logprobs) == 5
    assert (sample.span_start.tolist(), sample.span_version.tolist()) == ([0, 2, 3], [3, 4, 5])


async def test_every_conversation_with_a_sampled_token_is_a_sample(bench):
    async def environment(prompt, policy):
        first, second, third = [await policy.open([number]) for number in (5, 6, 7)]
        await second.generate()
        await first.generate()
        await first.generate()
        third.observe([9])
        return Outcome(1.0)

    async with bench(environment, Tokens([30])) as b:
        rollout = await b.attempt()
    assert [s.token_ids.tolist() for s in decode_samples(rollout.payload)] == [[5, 30, 30], [6, 30]]
    assert rollout.samples == 2


async def test_stop_names_ids_and_strings_of_one_token(bench):
    async def environment(prompt, policy):
        talk = await policy.open("x")
        await talk.generate(stop=[77, "!", "<eos>"], max_tokens=3, temperature=0.5)
        with pytest.raises(ValueError, match="single tokens"):
            await talk.generate(stop=["no"])
        return Outcome(1.0)

    async with bench(environment, Tokens([30])) as b:
        assert isinstance(await b.attempt(), Rollout)
    sampling = b.engine.requests[0]["sampling_params"]
    assert (sampling["stop_token_ids"], sampling["max_tokens"], sampling["temperature"]) == ([77, *ids_of("!"), EOS], 3, 0.5)


async def test_the_text_of_a_generation_leaves_out_the_token_that_ended_it(bench):
    seen = []

    async def environment(prompt, policy):
        talk = await policy.open("x")
        seen.extend([(await talk.generate()).text for _ in range(3)])
        seen.append(talk.text)
        return Outcome(1.0)

    script = replies(Tokens([*ids_of("hi"), EOS]), Tokens([EOS], finish="length"), Tokens(ids_of("yo")))
    async with bench(environment, script) as b:
        await b.attempt()
    assert seen == ["hi", "<eos>", "yo", "xhi<eos><eos>yo"]


async def test_P05_seeds_differ_per_turn_and_member_and_repeat_in_the_next_run(bench):
    async def environment(prompt, policy):
        talk = await policy.open("x")
        for _ in range(3):
            await talk.generate()
        return Outcome(1.0)

    async with bench(environment, Tokens([30])) as b:
        for seed in (1, 2, 1):
            await b.attempt(seed=seed)
    seeds = [r["sampling_params"]["seed"] for r in b.engine.requests]
    assert len(set(seeds[:6])) == 6
    assert seeds[:3] == seeds[6:]
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_H11_a_rollout_ends_truncated_with_its_good_turns_when_nothing_more_fits(bench):
    async def environment(prompt, policy):
        talk = await policy.open([5, 6])
        while True:
            await talk.generate(max_tokens=2)
            talk.observe([9, 9])

    async with bench(environment, Tokens([30, 31], finish="length")) as b:
        rollout = await b.attempt(max_rollout_tokens=9)
    (sample,) = decode_samples(rollout.payload)
    assert (rollout.finish, rollout.reward, rollout.turns) == ("truncated", -0.25, 2)
    assert sample.token_ids.tolist() == [5, 6, 30, 31, 9, 9, 30, 31]


async def test_the_last_turn_gets_what_is_left_of_the_budget(bench):
    async def environment(prompt, policy):
        talk = await policy.open([5, 6])
        await talk.generate()
        return Outcome(1.0)

    async with bench(environment, Tokens([30])) as b:
        await b.attempt(max_rollout_tokens=9, sampling=SamplingParams(max_tokens=100))
    assert b.engine.requests[0]["sampling_params"]["max_tokens"] == 7


async def test_H09_an_engine_context_that_is_full_truncates_after_good_turns_and_fails_before_any(bench):
    async def environment(prompt, policy):
        talk = await policy.open([5])
        for _ in range(3):
            await talk.generate()
        return Outcome(1.0)

    full = Status(400, "This model's maximum context length is 1 tokens")  # no budget fits
    async with bench(environment, replies(Tokens([30]), Tokens([31]), full)) as b:
        rollout = await b.attempt()
    assert (rollout.finish, rollout.sampled_tokens, len(b.engine.requests)) == ("truncated", 2, 3)
    assert rollout.turns == 2, "the one that was refused wrote nothing"
    names = [request["request_id"].split("-")[4] for request in b.engine.requests]
    assert (names, len({request["sampling_params"]["seed"] for request in b.engine.requests})) == (["1", "2", "3"], 3)
    async with bench(environment, full) as b:
        failure = await b.attempt()
    assert isinstance(failure, Failure)
    assert (failure.cause, failure.retryable, len(b.engine.requests)) == ("prompt_too_long", False, 1)


async def test_H11_an_environment_may_handle_truncation_and_keep_its_reward(bench):
    async def environment(prompt, policy):
        talk = await policy.open([5])
        await talk.generate()
        try:
            await talk.generate()
        except RolloutTruncated:
            return Outcome(0.5)
        return Outcome(1.0)

    async with bench(environment, Tokens([30])) as b:
        rollout = await b.attempt(max_rollout_tokens=2)
    assert (rollout.reward, rollout.finish) == (0.5, "truncated")


async def test_a_finished_attempt_keeps_its_reward_though_its_last_observation_is_too_long(bench):
    async def environment(prompt, policy):
        talk = await policy.open([5])
        await talk.generate()
        talk.observe([9] * 50)
        return Outcome(1.0)

    async with bench(environment, Tokens([30])) as b:
        rollout = await b.attempt(max_rollout_tokens=8)
    assert (rollout.reward, rollout.finish, rollout.tokens) == (1.0, "stop", 2)


# Chat messages --------------------------------------------------------------------------------------------------------------------------


def test_text_that_begins_a_history_gets_the_tokens_that_the_tokenizer_adds(tmp_path):
    from headway.worker.tokenizer import ModelTokenizer

    tokenizer = ModelTokenizer.load(write_tokenizer(tmp_path, adds_bos=True))
    assert tokenizer.encode_start("x") == [BOS, *ids_of("x")]
    assert tokenizer.encode_start("<bos>x") == [BOS, *ids_of("x")]
    assert tokenizer.encode("x") == ids_of("x")


@pytest.mark.parametrize(("turn", "closing"), [([*ids_of("hi"), IM_END], NEWLINE), (ids_of("hi"), [IM_END, *NEWLINE])])
async def test_messages_append_what_the_template_writes_behind_the_sampled_turn(bench, turn, closing):
    async def environment(prompt, policy):
        talk = await policy.open([{"role": "user", "content": "q"}])
        for question in ("r", "s"):
            await talk.generate()
            talk.observe([{"role": "user", "content": question}])
        await talk.generate()
        return Outcome(1.0)

    async with bench(environment, Tokens(turn)) as b:
        assert isinstance(await b.attempt(), Rollout)

    def user(text: str) -> list[int]:
        return [3, *ids_of(f"user\n{text}"), IM_END, *NEWLINE, 3, *ids_of("assistant\n")]

    assert [r["token_ids"] for r in b.engine.requests] == [
        user("q"),
        [*user("q"), *turn, *closing, *user("r")],
        [*user("q"), *turn, *closing, *user("r"), *turn, *closing, *user("s")],
    ]


DROPS_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COUNTS_MESSAGES = "{{ messages | length }} messages: {% for m in messages %}{{ m.content }}\n{% endfor %}"


async def test_a_template_that_drops_reasoning_from_earlier_turns_leaves_the_history_as_it_was(bench, tmp_path):
    async def environment(prompt, policy):
        talk = await policy.open([{"role": "user", "content": "q"}])
        await talk.generate()
        talk.observe([{"role": "user", "content": "r"}])
        await talk.generate()
        return Outcome(1.0)

    reasoning = [*ids_of("<think>so"), IM_END]
    directory = write_tokenizer(tmp_path, chat_template=DROPS_REASONING)
    async with bench(environment, Tokens(reasoning), directory=directory) as b:
        assert isinstance(await b.attempt(), Rollout)
    first, second = (r["token_ids"] for r in b.engine.requests)
    assert second[: len(first) + len(reasoning)] == first + reasoning


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (COUNTS_MESSAGES, "cannot be appended to"),
        ("", "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ],
)
async def test_messages_that_a_template_cannot_append_are_refused_by_name(bench, tmp_path, template, says):
    async def environment(prompt, policy):
        talk = await policy.open([{"role": "user", "content": "q"}])
        await talk.generate()
        talk.observe([{"role": "user", "content": "r"}])
        return Outcome(1.0)

    async with bench(environment, Tokens(ids_of("hi")), directory=write_tokenizer(tmp_path, chat_template=template)) as b:
        failure = await b.attempt()
    assert (failure.cause, failure.retryable) == ("environment_error", False)
    assert says in failure.detail


async def test_messages_after_text_or_twice_in_a_row_are_refused(bench):
    async def after_text(prompt, policy):
        talk = await policy.open("x")
        await talk.generate()
        talk.observe([{"role": "user", "content": "r"}])

    async def twice(prompt, policy):
        talk = await policy.open([{"role": "user", "content": "q"}])
        talk.observe([{"role": "user", "content": "r"}])

    for environment, says in ((after_text, "open it with messages"), (twice, "observe all messages of a turn together")):
        async with bench(environment, Tokens([30])) as b:
            failure = await b.attempt()
        assert says in failure.detail


def test_templates_run_in_a_sandbox_and_may_use_what_hugging_face_offers_them(tmp_path):
    from headway.errors import ConfigError
    from headway.worker.chat import read_chat_template

    rich = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index0 > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    write_tokenizer(tmp_path / "rich", chat_template=rich)
    template = read_chat_template(tmp_path / "rich")
    assert template.render([{"role": "user", "content": "é<"}], add_generation_prompt=True) == '<bos>{"role": "user", "content": "é<"}4'
    write_tokenizer(tmp_path / "evil", chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(ConfigError):
        read_chat_template(tmp_path / "evil").render([], add_generation_prompt=True)


def test_a_chat_template_in_a_file_of_its_own_is_found(tmp_path):
    from headway.worker.chat import read_chat_template

    write_tokenizer(tmp_path)
    assert read_chat_template(tmp_path) is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert read_chat_template(tmp_path).render([], add_generation_prompt=False) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert read_chat_template(tmp_path).render([], add_generation_prompt=False) == "jinja"


def test_numpy_ids_are_ids(model):
    from headway.worker.policy import _checked_ids

    ids: Any = np.array([1, 2])
    assert _checked_ids(ids) == [1, 2]
    with pytest.raises(TypeError):
        _checked_ids([1.5])
