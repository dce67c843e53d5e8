"""Fault cases of tokens, logprobs, masks and lengths (F, H09, K05): one run in which each prompt plays a case; all invariants hold."""

from itertools import groupby, pairwise
from typing import Literal

import msgspec
import numpy as np
import pytest
from shipped import batches_of, dropped_groups, failed_attempts, lost_of, rows_of, sampled_of

from headway.testing import Act, EngineScript, EnvironmentRule, EnvironmentScript, Reply, Rule, Stage, Turn
from headway.testing.model import EOS, ids_of

pytestmark = pytest.mark.e2e

RETOKENISED, MARKED, CONTINUED, ABORTED, WRONG_LOGPROBS, SPLIT, ONE_WRONG, TOO_MUCH, FILLED, TOO_LONG = range(
    10
)  # the group, and the prompt, that plays it
NOT_AGAIN = tuple(ids_of("<eos>"))  # five tokens whose text is one token
MARK = tuple(ids_of("##"))
WRONG: tuple[Literal["fewer", "none", "absent", "more"], ...] = ("fewer", "none", "absent", "more")
SPLIT_LENGTHS = (3, 9, 5)


def answered(group, reply, **more):
    nth = {"nth": more.pop("nth")} if "nth" in more else {}
    return Rule(match={"group": group, **more}, do=reply, **nth)


CONTEXT = 512
ENGINE = EngineScript(
    context=CONTEXT,
    rules=(
        answered(RETOKENISED, Reply(ids=NOT_AGAIN)),
        answered(MARKED, Reply(ids=tuple(ids_of("7890")), finish="stop")),
        answered(CONTINUED, Reply(ids=tuple(ids_of("a" * 60)), finish="abort"), member=0, nth=(1,)),
        answered(CONTINUED, Reply(ids=tuple(ids_of("b" * 40)), finish="length"), member=0),
        answered(CONTINUED, Reply(ids=tuple(ids_of("c" * 100)), finish="abort"), member=1),
        answered(ABORTED, Reply(ids=tuple(ids_of("d" * 12)), finish="abort"), member=0, attempt=0, nth=(1,)),
        answered(ABORTED, Reply(ids=(), finish="abort"), member=0, attempt=0, nth=(1, 2)),
        answered(ABORTED, Reply(ids=tuple(ids_of("eee")), finish=None), member=0, attempt=0),
        answered(ABORTED, Reply(ids=tuple(ids_of("fff")), finish=None), member=1),
        *(answered(WRONG_LOGPROBS, Reply(tokens=5, logprobs=wrong), member=member) for member, wrong in enumerate(WRONG)),
        *(answered(SPLIT, Reply(tokens=tokens), turn=turn) for turn, tokens in enumerate(SPLIT_LENGTHS, 1)),
        answered(ONE_WRONG, Reply(tokens=5, logprobs="fewer"), member=3),
        answered(TOO_MUCH, Reply(ids=tuple(ids_of("g" * 200))), member=0),
        answered(TOO_MUCH, Reply(ids=tuple(ids_of("h" * 100)), finish="length")),
    ),
)
FOUR_TURNS = Act(turns=(Turn(max_tokens=5, observe="<eos>"),) * 4)
THREE_TURNS = Act(turns=(Turn(max_tokens=4, observe=MARK),) * 3)
ONE_TURN = Act(turns=(Turn(max_tokens=100),))
FILLING = Act(turns=(Turn(max_tokens=4, observe=tuple(ids_of("o" * (CONTEXT // 2)))),) * 4)
THREE_SAMPLES = Act(turns=(Turn(max_tokens=20),), conversations=3)
ACTS = {
    RETOKENISED: FOUR_TURNS,
    MARKED: THREE_TURNS,
    CONTINUED: ONE_TURN,
    ABORTED: ONE_TURN,
    SPLIT: THREE_SAMPLES,
    TOO_MUCH: ONE_TURN,
    FILLED: FILLING,
    TOO_LONG: Act(open=tuple(ids_of("p" * CONTEXT))),
}


def rewarded(act, reward):
    return msgspec.structs.replace(act, reward=reward)


ENVIRONMENT = EnvironmentScript(
    prompts=10,
    rules=tuple(
        EnvironmentRule(match={"prompt": f"p{number:04d}", "member": members}, do=rewarded(act, reward))
        for number, act in ACTS.items()
        for members, reward in (([0, 2], 1.0), ([1, 3], 0.0))
    ),
)


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def stage(request, tmp_path_factory):
    """The run, at an engine of each kind, at its end."""
    settings = {
        "run.steps": 10,
        "prompts.shuffle": False,
        "prompts.epochs": 1,
        "rollout.max_tokens": 100,
        "rollout.groups_per_batch": 2,
        "rollout.max_prompt_failures": 1,
        "rollout.max_staleness": 4,  # a group that waits for its retries is no older at the end: nothing is given up by age
        "engine.kind": request.param,
    }
    engine = msgspec.structs.replace(ENGINE, speaks=request.param)
    with Stage(tmp_path_factory.mktemp("tokens"), engines=[engine], environment=ENVIRONMENT, settings=settings) as stage:
        ended = stage.play()
        assert ended.code == 0, ended.err
        stage.check(ended)
        yield stage


def prompts_sent(stage, group, member):
    return [entry["prompt"] for entry in stage.requests("arrived") if (entry["group"], entry["member"]) == (group, member)]


def test_F01_each_turn_is_sent_the_very_ids_of_all_before_it_and_never_their_text_anew(stage):
    """The engine samples `<`, `e`, `o`, `s`, `>`; as text that is the end token, which is what the environment then observes."""
    rows = rows_of(stage, group_id=RETOKENISED)
    assert len(rows) == 4
    for row in rows:
        sent = prompts_sent(stage, RETOKENISED, row["member"])
        assert len(sent) == 4
        for earlier, later in pairwise(sent):
            assert later == [*earlier, *NOT_AGAIN, EOS]
        [sample] = row["samples"]
        assert sample["token_ids"] == [*sent[-1], *NOT_AGAIN]
        assert sampled_of(sample) == [*NOT_AGAIN] * 4


def test_F08_the_mask_is_one_exactly_on_what_the_engine_wrote_in_this_rollout(stage):
    rows = rows_of(stage, group_id=MARKED)
    assert len(rows) == 4
    for row in rows:
        [sample] = row["samples"]
        opened, written = len(prompts_sent(stage, MARKED, row["member"])[0]), [1] * 4
        assert sample["loss_mask"] == sample["sampled_mask"]
        assert [int(mask) for mask in sample["loss_mask"]] == [0] * opened + written + [0, 0] + written + [0, 0] + written
        assert {token for token, mask in zip(sample["token_ids"], sample["loss_mask"], strict=True) if mask} == set(ids_of("7890"))


def test_F06_a_continuation_asks_for_what_is_left_and_for_nothing_when_nothing_is(stage):
    asked = {member: [] for member in range(4)}
    for entry in stage.requests("arrived"):
        if entry["group"] == CONTINUED:
            asked[entry["member"]].append(entry["max_tokens"])
    assert (asked[0], asked[1]) == ([100, 40], [100])
    for member, text in ((0, "a" * 60 + "b" * 40), (1, "c" * 100)):
        [row] = rows_of(stage, group_id=CONTINUED, member=member)
        assert (sampled_of(row["samples"][0]), row["finish"], row["turns"]) == (ids_of(text), "length", 1)


def test_F05_an_aborted_answer_is_continued_and_one_that_does_not_say_how_it_ended_is_never_shipped(stage):
    assert failed_attempts(stage, ABORTED) == {(0, "engine_error"): 1, (1, "engine_error"): 3}
    assert lost_of(stage, ABORTED) == {1: "engine_error"}
    assert sorted(row["member"] for row in rows_of(stage, group_id=ABORTED)) == [0, 2, 3]
    [row] = rows_of(stage, group_id=ABORTED, member=0)
    assert row["attempt"] == 1
    [answer] = [entry for entry in stage.requests("arrived") if (entry["group"], entry["member"], entry["attempt"]) == (ABORTED, 0, 1)]
    [written] = [entry for entry in stage.requests("finished") if entry["id"] == answer["id"]]
    assert sampled_of(row["samples"][0]) == written["ids"]
    first = [entry for entry in stage.requests("arrived") if (entry["group"], entry["member"], entry["attempt"]) == (ABORTED, 0, 0)]
    assert [entry["max_tokens"] for entry in first] == [100, 88, 88, 88]
    for entry in first[1:]:
        assert entry["prompt"] == [*first[0]["prompt"], *ids_of("d" * 12)]


def test_F03_logprobs_that_do_not_match_the_tokens_lose_the_rollout_by_that_cause_and_are_never_padded(stage):
    lost = lost_of(stage, WRONG_LOGPROBS)
    assert set(lost.values()) == {"length_mismatch"}
    assert len(lost) >= 3  # then its last member may be cancelled: one alone is no group
    assert dropped_groups(stage)[WRONG_LOGPROBS][0] == "incomplete"
    assert not rows_of(stage, group_id=WRONG_LOGPROBS)
    assert lost_of(stage, ONE_WRONG) == {3: "length_mismatch"}
    assert failed_attempts(stage, ONE_WRONG) == {(3, "length_mismatch"): 1}
    assert sorted(row["member"] for row in rows_of(stage, group_id=ONE_WRONG)) == [0, 1, 2]
    assert stage.rows("pipeline.jsonl")[-1]["lost"]["length_mismatch"] == len(lost) + 1


def test_F10_each_of_several_samples_carries_the_advantage_of_its_rollout_over_its_own_mask(stage):
    rows = rows_of(stage, group_id=SPLIT)
    assert sorted((row["member"], row["advantage"] > 0) for row in rows) == [(0, True), (1, False), (2, True), (3, False)]
    batch = batches_of(stage)[rows[0]["k"]]
    for place, row in enumerate(batch.rows):
        if row["group_id"] != SPLIT:
            continue
        assert [len(sampled_of(sample)) for sample in row["samples"]] == [*SPLIT_LENGTHS]
        mine = np.flatnonzero(batch.arrays["sample_rollout"] == place)
        assert len(mine) == 3
        for start, end in zip(batch.arrays["sample_offsets"][mine], batch.arrays["sample_offsets"][mine + 1], strict=True):
            advantages = batch.arrays["advantages"][start:end][batch.arrays["loss_mask"][start:end] == 1]
            assert advantages == pytest.approx(row["advantage"])


def test_K05_an_engine_that_writes_twice_what_it_may_moves_no_figure_past_what_was_shipped(stage):
    assert lost_of(stage, TOO_MUCH) == {0: "engine_error"}
    assert sorted(len(sampled_of(row["samples"][0])) for row in rows_of(stage, group_id=TOO_MUCH)) == [100] * 3
    for row in stage.rows("metrics.jsonl"):
        shipped = [sum(len(sample["token_ids"]) for sample in each["samples"]) for each in rows_of(stage, k=row["batch"])]
        assert (row["tokens"], row["rollout_tokens_max"]) == (sum(shipped), max(shipped))
        assert row["rollout_tokens_mean"] == pytest.approx(sum(shipped) / len(shipped))
    filled = {row["k"] for row in rows_of(stage, group_id=FILLED)}
    assert max(row["rollout_tokens_max"] for row in stage.rows("metrics.jsonl") if row["batch"] not in filled) <= 6 + 100


def test_H09_a_context_that_is_full_ends_a_rollout_with_its_good_turns_and_a_prompt_beyond_it_is_skipped_and_counted(stage):
    """The engine is asked once for what does not fit: a limit is no failure that may pass."""
    rows = rows_of(stage, group_id=FILLED)
    assert [(row["member"], row["finish"]) for row in rows] == [(member, "truncated") for member in range(4)]
    for row in rows:
        [sample] = row["samples"]
        assert [written for written, _ in groupby(sample["sampled_mask"])].count(True) == 2, "its good turns"
    assert all(len(prompts_sent(stage, FILLED, member)) == 3 for member in range(4))
    assert not failed_attempts(stage, FILLED)
    lost = lost_of(stage, TOO_LONG)
    assert set(lost.values()) == {"prompt_too_long"}
    assert all(len(prompts_sent(stage, TOO_LONG, member)) == 1 for member in lost)
    assert dropped_groups(stage)[TOO_LONG] == ("incomplete", False)
    assert stage.rows("pipeline.jsonl")[-1]["lost"]["prompt_too_long"] == len(lost)
