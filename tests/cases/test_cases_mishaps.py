"""Fault cases of tool calls, environments and single requests that fail (H01, H03, H04, H13, I12): one mishap costs one rollout."""

from collections import Counter

import msgspec
import pytest
from shipped import dropped_groups, events_of, failed_attempts, lost_of, rows_of, sampled_of

from headway.events import Finished, RolloutDropped
from headway.testing import Act, EngineScript, EnvironmentRule, EnvironmentScript, Fault, Reply, Rule, Stage, Turn
from headway.testing.model import EOS, ids_of

pytestmark = pytest.mark.e2e

TOOLS, UNGUARDED, TUNNEL, SHORT, REFUSED, SILENT = range(6)  # the group, and the prompt, that plays it
CALLS = ('{"a": ', '{"a": 1,}', "{'a': 1}", '{"a": 1}')
SAID = "the tunnel is dead"


def answered(group, reply, **more):
    return Rule(match={"group": group, **more}, do=reply)


def played(group, act, **more):
    return EnvironmentRule(match={"prompt": f"p{group:04d}", **more}, do=act)


ENGINE = EngineScript(
    rules=(
        *(answered(TOOLS, Reply(ids=tuple(ids_of(text))), member=member, turn=1) for member, text in enumerate(CALLS)),
        answered(SHORT, Reply(ids=()), member=0),
        answered(SHORT, Reply(ids=(EOS,)), member=1),
        answered(REFUSED, Reply(status=422, text="no such thing"), member=2),
    )
)
ENVIRONMENT = EnvironmentScript(
    prompts=8,
    rules=(
        played(TOOLS, Act(turns=(Turn(tool=True, observe="ok", tool_error="error"), Turn()))),
        played(UNGUARDED, Act(turns=(Turn(), Turn(fault=Fault(error="JSONDecodeError: Expecting value")))), member=1),
        played(TUNNEL, Act(turns=(), fault=Fault(error=SAID)), member=0),
        played(SILENT, Act(turns=())),
    ),
)


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def stage(request, tmp_path_factory):
    """The run, at an engine of each kind, at its end."""
    settings = {
        "engine.kind": request.param,
        "run.steps": 10,
        "prompts.shuffle": False,
        "prompts.epochs": 1,
        "rollout.groups_per_batch": 2,
        "rollout.max_tokens": 16,
        "rollout.max_prompt_failures": 1,
        "rollout.max_staleness": 4,  # a group that waits for its retries is no older at the end: nothing is given up by age
    }
    engine = msgspec.structs.replace(ENGINE, speaks=request.param)
    with Stage(tmp_path_factory.mktemp("mishaps"), engines=[engine], environment=ENVIRONMENT, settings=settings) as stage:
        ended = stage.play()
        assert ended.code == 0, ended.err
        stage.check(ended)
        yield stage


def attempts_of(stage, group, member):
    return [entry["attempt"] for entry in stage.environment_entries("reset") if (entry["group"], entry["member"]) == (group, member)]


def test_H01_a_tool_call_that_is_no_json_is_answered_by_an_error_turn_and_the_rollout_goes_on(stage):
    rows = rows_of(stage, group_id=TOOLS)
    assert [row["member"] for row in rows] == [0, 1, 2, 3]
    for row, call in zip(rows, CALLS, strict=True):
        assert (row["turns"], row["attempt"], row["drop_cause"]) == (2, 0, None)
        [sample] = row["samples"]
        mask = sample["sampled_mask"]
        first = mask.index(True)
        after = mask.index(False, first)
        observed = sample["token_ids"][after : mask.index(True, after)]
        assert sample["token_ids"][first:after] == ids_of(call)
        assert observed == ids_of("ok" if row["member"] == 3 else "error")
    assert not failed_attempts(stage, TOOLS)


def test_H01_an_environment_that_trips_over_one_costs_that_rollout_alone(stage):
    assert failed_attempts(stage, UNGUARDED) == {(1, "environment_error"): 3}
    assert lost_of(stage, UNGUARDED) == {1: "environment_error"}
    assert [row["member"] for row in rows_of(stage, group_id=UNGUARDED)] == [0, 2, 3]
    assert attempts_of(stage, UNGUARDED, 1) == [0, 1, 2]


def test_H04_an_error_before_the_first_turn_is_counted_and_told_by_its_cause_and_not_as_emptiness(stage):
    assert failed_attempts(stage, TUNNEL) == {(0, "environment_error"): 3}
    details = [event.detail for event in events_of(stage, RolloutDropped) if event.group == TUNNEL]
    assert len(details) == 3
    assert all(SAID in detail for detail in details)
    assert SAID in (stage.run / "events.log").read_text()
    assert [row["member"] for row in rows_of(stage, group_id=TUNNEL)] == [1, 2, 3]


def test_H04_emptiness_without_an_error_is_counted_as_such(stage):
    silent = lost_of(stage, SILENT)
    assert set(silent.values()) == {"empty_completion"}
    assert len(silent) >= 3, "so many that the group is given up"
    assert dropped_groups(stage)[SILENT][0] == "incomplete"
    lost = stage.rows("pipeline.jsonl")[-1]["lost"]
    assert (lost["environment_error"], lost["empty_completion"]) == (6, len(silent) + 1)  # by attempts


def test_H13_an_empty_answer_is_lost_by_its_cause_and_a_lone_end_token_is_kept_and_trained(stage):
    assert lost_of(stage, SHORT) == {0: "empty_completion"}
    rows = rows_of(stage, group_id=SHORT)
    assert [row["member"] for row in rows] == [1, 2, 3]
    [sample] = rows[0]["samples"]
    assert (sampled_of(sample), sum(sample["loss_mask"]), rows[0]["trained"]) == ([EOS], 1, True)
    assert all(row["trained"] for row in rows)


def test_I12_a_request_that_is_refused_for_good_loses_its_rollout_and_no_other(stage):
    assert lost_of(stage, REFUSED) == {2: "engine_error"}
    [detail] = {event.detail for event in events_of(stage, RolloutDropped) if event.group == REFUSED}
    assert "answered 422: no such thing" in detail
    assert [row["member"] for row in rows_of(stage, group_id=REFUSED)] == [0, 1, 3]


FAILING = {
    "H04": (EngineScript(), EnvironmentScript(default=Act(turns=(), fault=Fault(error=SAID))), SAID, "[environment]"),
    "I12": (EngineScript(default=Reply(status=422, text="no such thing")), EnvironmentScript(), "answered 422: no such thing", "[engine]"),
}


@pytest.mark.parametrize("case", FAILING)
def test_H04_I12_where_all_fail_the_run_ends_by_the_last_cause(tmp_path, case):
    engine, environment, cause, whose = FAILING[case]
    settings = {"run.max_consecutive_failures": 20}
    with Stage(tmp_path, engines=[engine], environment=environment, settings=settings) as stage:
        ended = stage.play()
        assert ended.code == 1
        assert "20 attempts in a row" in ended.last_error
        assert cause in ended.last_error
        assert ended.last_error.endswith(whose)
        stage.check(ended)


EVERY, KILLS = 20, 70  # one attempt in so many raises, and takes its worker along


def test_H03_attempts_that_raise_and_workers_that_die_are_retried_afresh_and_the_books_close(tmp_path):
    rules = (
        EnvironmentRule(every=KILLS, do=Act(turns=(Turn(), Turn(fault=Fault(kill=True))))),
        EnvironmentRule(every=2 * EVERY, do=Act(turns=(Turn(), Turn(fault=Fault(error="a flake"))))),
        EnvironmentRule(every=2 * EVERY, after=EVERY, do=Act(fault=Fault(error="a flake"))),
    )
    settings = {"run.steps": 16, "environment.workers": 2}
    environment = EnvironmentScript(prompts=100, rules=rules, default=Act(turns=(Turn(), Turn())))
    with Stage(tmp_path, environment=environment, settings=settings) as stage:
        ended = stage.play()
        assert ended.code == 0, ended.err
        stage.check(ended)
        assert len(stage.rows("metrics.jsonl")) == 16
        attempts = Counter((entry["group"], entry["member"], entry["attempt"]) for entry in stage.environment_entries("reset"))
        assert set(attempts.values()) == {1}, "each attempt has an environment of its own"
        finished = {(event.group, event.member, event.attempt) for event in events_of(stage, Finished)}
        dropped = {(event.group, event.member, event.attempt): event for event in events_of(stage, RolloutDropped) if not event.finished}
        assert not finished & dropped.keys()
        unstarted = {attempt for attempt in dropped if attempt not in attempts}  # died with their worker before they began
        assert all(dropped[attempt].cause in {"worker_died", "cancelled"} for attempt in unstarted)
        assert attempts.keys() <= finished | dropped.keys()
        causes = Counter(event.cause for event in dropped.values())
        raised = [entry for entry in stage.environment_entries("raised") if "a flake" in entry["error"]]
        told = Counter(dropped[entry["group"], entry["member"], entry["attempt"]].cause for entry in raised)
        assert told.keys() <= {"environment_error", "worker_died", "cancelled"}, "some raise, and their worker dies before it says so"
        assert causes["environment_error"] == told["environment_error"] >= len(attempts) // (4 * EVERY)
        assert causes["worker_died"] >= len(attempts) // KILLS >= 2
        retried = [event for event in dropped.values() if event.cause in {"environment_error", "worker_died"} and not event.final]
        assert all((event.group, event.member, event.attempt + 1) in finished | dropped.keys() for event in retried)
        assert max(attempt for _, _, attempt in attempts) < 3
        deaths = (stage.run / "events.log").read_text().count("rollouts are lost with it")
        unreplaced = deaths - stage.rows("pipeline.jsonl")[-1]["worker_restarts"]
        assert 0 <= unreplaced <= 2, "only the last death of each worker may come too late for a restart that the last row counts"
