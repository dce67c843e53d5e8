"""Fault cases of members that fail (D03, D04, D09, D10, G04), as whole runs in which each prompt plays a case; all invariants hold."""

import math

import numpy as np
import pytest
from shipped import dropped_groups, events_of, failed_attempts, lost_of, rows_of, sampled_of

from headway.events import RolloutDropped
from headway.testing import Act, EngineScript, EnvironmentRule, EnvironmentScript, Fault, Reply, Rule, Stage, Turn

pytestmark = pytest.mark.e2e

TWO_FAIL, ONE_IS_LEFT, BROKEN_OFF, ABORTED, NO_NUMBERS, HONEST = range(6)  # the group, and the prompt, that plays it
NONE_IS_ONE: tuple[str | bool, ...] = ("nan", "inf", "-inf", "0.5", True)  # 1e400 is what "inf" reads as
IN_ORDER = {"run.steps": 100, "prompts.shuffle": False, "prompts.epochs": 1, "rollout.groups_per_batch": 1}


def acted(prompt, act, **more):
    return EnvironmentRule(match={"prompt": f"p{prompt:04d}", **more}, do=act)


def answered(group, reply, *, nth=(), **more):
    return Rule(match={"group": group, **more}, do=reply, nth=nth)


FIVE_TURNS = (Turn(max_tokens=4, observe="<"),) * 5
BREAKS_OFF = (*FIVE_TURNS[:2], Turn(fault=Fault(error="connection reset by peer")), *FIVE_TURNS[3:])
PARTIAL = EnvironmentScript(
    prompts=6,
    rules=(
        acted(TWO_FAIL, Act(after=Fault(error="boo")), member=[0, 1]),
        acted(ONE_IS_LEFT, Act(reward="nan"), member=[*range(7)]),
        acted(ONE_IS_LEFT, Act(after=Fault(seconds=2))),
        acted(BROKEN_OFF, Act(turns=BREAKS_OFF), member=0, attempt=0),
        acted(BROKEN_OFF, Act(turns=FIVE_TURNS)),
        acted(ABORTED, Act(reward=0.25), member=0, attempt=0),
        acted(ABORTED, Act(reward=0.75), member=0),
        acted(ABORTED, Act(reward=0.5)),
        *(acted(NO_NUMBERS, Act(reward=wrong), member=member) for member, wrong in enumerate(NONE_IS_ONE)),
        *(acted(NO_NUMBERS, Act(reward=float(member)), member=member) for member in (5, 6, 7)),
    ),
)
ENGINE = EngineScript(
    rules=(
        answered(BROKEN_OFF, Reply(cut=True), nth=(1,), member=1, turn=3),
        answered(ABORTED, Reply(tokens=30, finish="abort"), nth=(1,), member=0, attempt=0),
        answered(ABORTED, Reply(status=500, text="out of order"), member=0, attempt=0),
        answered(ABORTED, Reply(tokens=50), member=0),
    )
)


@pytest.fixture(scope="module")
def partial(tmp_path_factory):
    """A run of groups of 8 that trains on what is left of them, at its end."""
    settings = {**IN_ORDER, "rollout.group_size": 8, "rollout.max_concurrent": 48, "rollout.max_tokens": 64}
    settings["rollout.max_staleness"] = 6  # as many as there are groups: who waits for retries is not given up by age
    with Stage(tmp_path_factory.mktemp("partial"), engines=[ENGINE], environment=PARTIAL, settings=settings) as stage:
        ended = stage.play()
        assert ended.code == 0, ended.err
        stage.check(ended)
        yield stage


def resets(stage, prompt, member):
    return [
        (entry["what"], entry["attempt"])
        for entry in stage.environment_entries("reset", "close")
        if (entry["prompt"], entry["member"]) == (f"p{prompt:04d}", member)
    ]


def test_D03_two_of_eight_fail_and_six_are_trained_with_statistics_over_six(partial):
    rows = rows_of(partial, group_id=TWO_FAIL)
    assert sorted(row["member"] for row in rows) == [2, 3, 4, 5, 6, 7]
    rewards = np.array([row["reward"] for row in rows])
    assert rewards.std() > 0
    assert [row["advantage"] for row in rows] == pytest.approx((rewards - rewards.mean()) / (rewards.std() + 1e-6))
    assert failed_attempts(partial, TWO_FAIL) == {(0, "environment_error"): 3, (1, "environment_error"): 3}


def test_D03_a_member_that_is_left_alone_is_not_shipped_and_what_would_fail_again_is_tried_once(partial):
    assert not rows_of(partial, prompt_id=f"p{ONE_IS_LEFT:04d}")
    assert dropped_groups(partial)[ONE_IS_LEFT] == ("incomplete", False)
    assert failed_attempts(partial, ONE_IS_LEFT) == {(member, "bad_reward"): 1 for member in range(7)}
    assert len([row for row in partial.environment_entries("reset") if row["prompt"] == f"p{ONE_IS_LEFT:04d}"]) == 8


def test_D09_an_attempt_that_breaks_off_begins_anew_and_leaves_no_second_branch(partial):
    assert resets(partial, BROKEN_OFF, 0) == [("reset", 0), ("close", 0), ("reset", 1), ("close", 1)]
    [row] = rows_of(partial, group_id=BROKEN_OFF, member=0)
    assert (row["attempt"], row["turns"], len(row["samples"])) == (1, 5, 1)
    played = [entry for entry in partial.environment_entries("step") if (entry["group"], entry["member"]) == (BROKEN_OFF, 0)]
    assert [(entry["attempt"], entry["turn"]) for entry in played] == [(0, 1), (0, 2), *((1, turn) for turn in range(1, 6))]
    assert sampled_of(row["samples"][0]) == [token for entry in played[2:] for token in entry["ids"]]


def test_D09_an_engine_that_drops_the_connection_is_asked_again_and_the_environment_goes_on_where_it_was(partial):
    assert resets(partial, BROKEN_OFF, 1) == [("reset", 0), ("close", 0)]
    asked = [entry["turn"] for entry in partial.requests("arrived") if (entry["group"], entry["member"]) == (BROKEN_OFF, 1)]
    assert asked == [1, 2, 3, 3, 4, 5]
    [row] = rows_of(partial, group_id=BROKEN_OFF, member=1)
    assert (row["attempt"], row["turns"], len(row["samples"])) == (0, 5, 1)


def test_D10_a_rollout_that_was_tried_again_carries_nothing_of_the_attempt_before(partial):
    assert failed_attempts(partial, ABORTED) == {(0, "engine_error"): 1}
    [row] = rows_of(partial, group_id=ABORTED, member=0)
    [sample] = row["samples"]
    assert (row["attempt"], row["reward"], len(sampled_of(sample)), sum(sample["loss_mask"])) == (1, 0.75, 50, 50)
    assert len(sample["token_ids"]) == len(sample["logprobs"]) == len(sample["loss_mask"]) == 6 + 50
    assert sum(logprob < 0 for logprob in sample["logprobs"]) == 50


def test_G04_a_reward_that_is_no_finite_number_loses_its_member_and_leaves_the_others_finite(partial):
    assert lost_of(partial, NO_NUMBERS) == dict.fromkeys(range(5), "bad_reward")
    assert failed_attempts(partial, NO_NUMBERS).total() == 5
    rows = rows_of(partial, group_id=NO_NUMBERS)
    assert sorted((row["member"], row["reward"]) for row in rows) == [(5, 5.0), (6, 6.0), (7, 7.0)]
    assert all(math.isfinite(row["advantage"]) for row in rows)
    [metrics] = [row for row in partial.rows("metrics.jsonl") if row["batch"] == rows[0]["k"]]
    assert (metrics["reward_mean"], metrics["lost_rollouts"]) == (6.0, 5)


# ------------------------------------------------------------------------------------------------------------- where incomplete groups go

TWO_OF_FOUR, MISALIGNED, TOO_LONG, EMPTY, TOO_LATE, NO_NUMBER, WELL = range(7)
ROUTES = {MISALIGNED: "length_mismatch", TOO_LONG: "over_length", EMPTY: "empty_completion", TOO_LATE: "timeout", NO_NUMBER: "bad_reward"}
WAITS = Act(after=Fault(seconds=200))
DROP = EnvironmentScript(
    prompts=7,
    rules=(
        acted(TWO_OF_FOUR, Act(reward="nan", after=Fault(seconds=1)), member=[0, 1]),
        acted(TWO_OF_FOUR, WAITS),
        acted(TOO_LATE, Act(after=Fault(hang=True)), member=2, group=TOO_LATE),
        acted(NO_NUMBER, Act(reward="nan"), member=2),
    ),
)
WRONG_ANSWERS = EngineScript(
    default=Reply(tokens=5),
    rules=(
        answered(MISALIGNED, Reply(tokens=5, logprobs="fewer"), member=2),
        answered(TOO_LONG, Reply(tokens=(9, 9)), member=2),
        answered(EMPTY, Reply(ids=()), member=2),
    ),
)


@pytest.fixture(scope="module")
def dropping(tmp_path_factory):
    """A run that drops incomplete groups, whatever else it is set to, at its end."""
    more = {"rollout.overlong": "drop", "rollout.dynamic_sampling": True, "rollout.timeout_seconds": 20, "rollout.max_concurrent": 48}
    settings = {**IN_ORDER, **more, "rollout.incomplete": "drop", "run.max_empty_batches": 50}
    with Stage(tmp_path_factory.mktemp("drop"), engines=[WRONG_ANSWERS], environment=DROP, settings=settings) as stage:
        ended = stage.play()
        assert ended.code == 0, ended.err
        stage.check(ended)
        yield stage


def test_D03_under_drop_one_loss_is_enough_and_the_siblings_are_cancelled(dropping):
    assert dropped_groups(dropping)[TWO_OF_FOUR] == ("incomplete", False)
    assert not rows_of(dropping, prompt_id=f"p{TWO_OF_FOUR:04d}")
    cancelled = {entry["member"] for entry in dropping.environment_entries("cancel") if entry["prompt"] == f"p{TWO_OF_FOUR:04d}"}
    assert cancelled >= {2, 3}
    assert set(lost_of(dropping, TWO_OF_FOUR).values()) == {"bad_reward"}, "they do not run on until their time is up"


@pytest.mark.parametrize(("group", "cause"), ROUTES.items(), ids=ROUTES.values())
def test_D04_a_group_that_lost_a_member_by_any_route_is_never_shipped_incomplete(dropping, group, cause):
    assert lost_of(dropping, group) == {2: cause}
    assert not rows_of(dropping, group_id=group)
    assert dropped_groups(dropping)[group] == ("incomplete", cause == "timeout")
    lost = dropping.rows("pipeline.jsonl")[-1]["lost"]
    assert lost[cause] == (1 if cause != "bad_reward" else len(lost_of(dropping, TWO_OF_FOUR)) + 1)


def test_D04_what_would_go_well_another_time_is_tried_again_and_what_is_whole_is_trained(dropping):
    trained = {row["prompt_id"]: row["group_id"] for row in rows_of(dropping)}
    assert set(trained) == {f"p{TOO_LATE:04d}", f"p{WELL:04d}"}
    assert trained[f"p{TOO_LATE:04d}"] > WELL
    assert all(row["groups"] * 4 == row["rollouts"] for row in dropping.rows("metrics.jsonl"))


# --------------------------------------------------------------------------------------------------------------- groups scored as a whole

SCORED_WHOLE = EnvironmentScript(
    prompts=4,
    rules=(
        acted(0, Act(turns=(Turn(fault=Fault(error="boo")),)), member=3),
        EnvironmentRule(match={"what": "score", "prompt": "p0001"}, do=Act(reward=None)),
    ),
)


def test_D03_a_group_that_is_scored_as_a_whole_is_dropped_when_a_member_is_lost_whatever_the_config_says(tmp_path):
    scored = {"environment.score": "headway.testing.environment:score", "environment.score_scope": "group"}
    settings = {**IN_ORDER, **scored, "rollout.incomplete": "partial", "rollout.max_attempts": 2, "rollout.max_prompt_failures": 2}
    with Stage(tmp_path, environment=SCORED_WHOLE, settings=settings) as stage:
        ended = stage.play()
        assert ended.code == 0, ended.err
        stage.check(ended)
        assert {row["prompt_id"] for row in rows_of(stage)} == {"p0002", "p0003"}
        assert {dropped_groups(stage)[group][0] for group in (0, 1)} == {"incomplete"}
        assert failed_attempts(stage, 0) == {(3, "environment_error"): 2}
        assert set(lost_of(stage, 1).values()) == {"bad_reward"}
        asked = [entry["prompt"] for entry in stage.environment_entries("score")]
        assert "p0000" not in asked
        assert all(entry["rollouts"] == 4 for entry in stage.environment_entries("score"))


# ------------------------------------------------------------------------------------------------------------- a worker that is no more

DIES_AT_THE_THIRD = (*FIVE_TURNS[:2], Turn(fault=Fault(kill=True)), *FIVE_TURNS[3:])
KILLED = EnvironmentScript(prompts=4, rules=(acted(1, Act(turns=DIES_AT_THE_THIRD), member=0, attempt=0),), default=Act(turns=FIVE_TURNS))


def test_D09_what_was_in_a_worker_that_died_begins_anew_and_ships_one_branch(tmp_path):
    settings = {**IN_ORDER, "environment.workers": 1, "rollout.max_staleness": 4, "rollout.steps_ahead": 4}
    with Stage(tmp_path, environment=KILLED, settings=settings) as stage:
        ended = stage.play()
        assert ended.code == 0, ended.err
        stage.check(ended)
        rows = rows_of(stage)
        assert len(rows) == 4 * 4
        [fatal] = [row for row in rows if (row["group_id"], row["member"]) == (1, 0)]
        assert fatal["attempt"] == 1
        begun = [(entry["group"], entry["member"], entry["attempt"]) for entry in stage.environment_entries("reset")]
        assert len(set(begun)) == len(begun)
        steps = stage.environment_entries("step")
        for row in rows:
            name = row["group_id"], row["member"], row["attempt"]
            assert (*name[:2], 0) in begun
            played = [entry for entry in steps if (entry["group"], entry["member"], entry["attempt"]) == name]
            assert [entry["turn"] for entry in played] == [1, 2, 3, 4, 5]
            [sample] = row["samples"]
            assert sampled_of(sample) == [token for entry in played for token in entry["ids"]]
        died = {event.cause for event in events_of(stage, RolloutDropped)}
        assert died == {"worker_died"}
