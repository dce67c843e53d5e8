"""Fault cases of rewards and of batches that nothing can be learned from (G01, G03, G05, G07), as whole runs."""

import signal

import pytest
from shipped import batches_of, events_of, lost_of, rows_of

from headway.cli import command_line
from headway.config import load_config
from headway.events import BatchFormed, GroupDropped, Ready, RolloutDropped
from headway.rules.advantages import GROUP_RELATIVE
from headway.testing import Act, EngineScript, EnvironmentRule, EnvironmentScript, Fault, Reply, Rule, Stage, assert_run
from headway.testing.model import ids_of

pytestmark = pytest.mark.e2e

IN_ORDER = {"prompts.shuffle": False, "run.steps": 100, "prompts.epochs": 1}


def alike(*numbers):
    return EnvironmentRule(match={"prompt": [f"p{number:04d}" for number in numbers]}, do=Act(reward=0.5))


def told_apart(member, reward):
    return EnvironmentRule(match={"member": member}, do=Act(reward=reward))


VARIED = (told_apart([0, 1], 1.0), told_apart([2, 3], 0.0))
ONE_AT_A_TIME = {"rollout.groups_per_batch": 1, "rollout.max_staleness": 0, "rollout.steps_ahead": 0, "run.max_empty_batches": 3}


def test_G01_no_batch_without_an_advantage_is_shipped_and_after_the_limit_the_run_ends_with_what_was_dropped(tmp_path):
    """Two alike, one that varies, two alike, one that varies, then nothing but alike: two in a row are no reason to end, three are."""
    environment = EnvironmentScript(prompts=20, rules=(alike(0, 1, 3, 4, *range(6, 20)), *VARIED))
    with Stage(tmp_path, environment=environment, settings={**IN_ORDER, **ONE_AT_A_TIME}) as stage:
        ended = stage.play()
        stage.check(ended)
        assert ended.code == 1
        assert "3 groups in a row had nothing to train on (run.max_empty_batches x groups_per_batch)" in ended.last_error
        assert "groups dropped as zero_advantage 6, groups whose members all scored alike 3" in ended.last_error
        assert [(row["k"], row["prompt_id"]) for row in rows_of(stage, member=0)] == [(0, "p0002"), (1, "p0005")]
        for batch in batches_of(stage).values():
            mask = batch.arrays["loss_mask"] == 1
            assert mask.any()
            assert batch.arrays["advantages"][mask].any()
        assert len([event for event in events_of(stage, GroupDropped) if event.cause == "zero_advantage"]) == 6
        assert [entry["k"] for entry in stage.trainer.entries() if entry["what"] == "consumed"] == [0, 1]


JUDGE = '''"""Two rewards: whether there is an answer, and whether it is short; either may not know."""

from headway import single_turn


def correct(prompt, completion):
    return {"n": None, "p": 0.5}.get(completion.text[0], float(len(completion.text) % 3))


def short(prompt, completion):
    return None if completion.text[0] in "np" else 1.0


attempt = single_turn([correct, short], prompt_field="number_text")


def prompts():
    return [{"id": f"p{number}", "number_text": str(number)} for number in range(6)]
'''


def test_G03_what_nobody_can_tell_is_in_no_statistic_and_what_one_can_tell_counts_by_that(tmp_path):
    (tmp_path / "judged.py").write_text(JUDGE)
    script = EngineScript(
        rules=(
            Rule(match={"member": 0}, do=Reply(ids=tuple(ids_of("nobody")))),
            Rule(match={"member": 1}, do=Reply(ids=tuple(ids_of("partly")))),
        )
    )
    settings = {**IN_ORDER, "environment.entry": "judged:attempt", "prompts.source": "judged:prompts", "rollout.groups_per_batch": 2}
    with Stage(tmp_path, engines=[script], settings=settings) as stage:
        ended = stage.play()
        assert ended.code == 0, ended.err
        assert_run(stage.run, engine_logs=stage.engine_logs, trainer_logs=[stage.trainer.log_path], exit_code=0)
        assert all(lost_of(stage, group) == {0: "bad_reward"} for group in range(6))
        rows = rows_of(stage)
        assert {row["member"] for row in rows} == {1, 2, 3}
        for row in rows:
            parts = dict(row["rewards"])
            assert row["reward"] == sum(parts.values())
            assert (parts == {"correct": 0.5}) == (row["member"] == 1)
        for metrics in stage.rows("metrics.jsonl"):
            mine = [row for row in rows if row["k"] == metrics["batch"]]
            assert metrics["reward_mean"] == pytest.approx(sum(row["reward"] for row in mine) / len(mine))
            assert metrics["lost_rollouts"] == metrics["groups"]
            told = [dict(row["rewards"])["short"] for row in mine if "short" in dict(row["rewards"])]
            assert (metrics["reward/short_mean"], len(told)) == (1.0, 2 * metrics["groups"])
            assert (metrics["reward/short_share"], metrics["reward/correct_share"]) == (pytest.approx(2 / 3), 1.0)
        assert stage.rows("pipeline.jsonl")[-1]["lost"]["bad_reward"] == 6


SLOW_SCORES = EnvironmentRule(match={"what": "score", "prompt": "p*"}, times=32, do=Act(fault=Fault(hang=True), reward=0.0))
SCORED = EnvironmentScript(prompts=8, default_score=Act(reward="sampled"), rules=(SLOW_SCORES,))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_G05_what_is_being_scored_when_the_run_is_interrupted_is_no_wrong_answer_and_is_scored_when_it_goes_on(tmp_path, number):
    """32 rollouts hang in the scorer; the run is interrupted, and taken up again with a scorer that answers."""
    settings = {
        **IN_ORDER,
        "environment.score": "headway.testing.environment:score",
        "rollout.max_concurrent": 32,
        "rollout.groups_per_batch": 2,
        "rollout.max_staleness": 3,
        "rollout.steps_ahead": 3,
        "run.drain_timeout_seconds": 1,
    }
    with Stage(tmp_path, environment=SCORED, settings=settings) as stage:
        run = stage.start()
        stage.until(lambda: len(stage.environment_entries("score")) >= 32, what="32 scores")
        run.signal(number)
        ended = run.end()
        assert ended.code == 128 + number, ended.err
        stage.check(ended)
        assert not batches_of(stage)
        assert not events_of(stage, RolloutDropped, Ready, BatchFormed)
        stage.trainer.start()
        again = stage.play(resume=True)
        assert again.code == 0, again.err
        stage.check(again)
        assert len(rows_of(stage)) == 32
        assert len(stage.environment_entries("reset")) == 32
        assert {row["reward"] for row in rows_of(stage)} != {0.0}


def test_G05_what_is_being_scored_when_its_time_is_up_is_lost_with_that_cause(tmp_path):
    hangs = EnvironmentRule(match={"what": "score", "prompt": ["p0000", "p0003"]}, do=Act(fault=Fault(hang=True), reward=0.0))
    scored = {"environment.score": "headway.testing.environment:score", "environment.score_timeout_seconds": 6}
    environment = EnvironmentScript(prompts=6, default_score=Act(reward="sampled"), rules=(hangs,))
    with Stage(tmp_path, environment=environment, settings={**IN_ORDER, **scored, "rollout.max_prompt_failures": 1}) as stage:
        ended = stage.play()
        assert ended.code == 0, ended.err
        stage.check(ended)
        assert {row["prompt_id"] for row in rows_of(stage)} == {"p0001", "p0002", "p0004", "p0005"}
        lost = [event.cause for event in events_of(stage, RolloutDropped)]
        assert set(lost) == {"score_error"}
        assert stage.rows("pipeline.jsonl")[-1]["lost"]["score_error"] == len(lost) >= 8


@pytest.mark.parametrize("advantage", sorted(GROUP_RELATIVE))
def test_G07_groups_of_one_are_refused_where_members_are_compared_and_groups_of_two_are_not(tmp_path, advantage, capsys):
    stage = Stage(tmp_path, settings={"rollout.advantage": advantage, "engine.urls": ["http://127.0.0.1:1"]})
    stage.write_config(rollout__group_size=1)
    assert command_line(["run", str(stage.config)]) == 2
    said = capsys.readouterr().err
    assert "rollout.group_size" in said
    assert advantage in said
    assert not stage.run.exists()
    stage.write_config(rollout__group_size=2)
    assert load_config(stage.config).rollout.group_size == 2
