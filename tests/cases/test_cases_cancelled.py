"""Fault cases of cancellation and of slots that come free (C07, D07, D11), as one whole run: groups of 51 hang, and are lost by one."""

import os
import time
from pathlib import Path

import pytest
from shipped import dropped_groups, events_of, rows_of, sampled_of

from headway.events import Admitted, GroupDropped
from headway.testing import Act, EngineScript, EnvironmentRule, EnvironmentScript, Reply, Rule, Stage, Turn

pytestmark = pytest.mark.e2e

MEMBERS = 51
LAST = MEMBERS - 1  # asks again and again, until it is answered with nonsense
HANGS = [
    Rule(
        match={"group": [0, 1], "turn": turn, "member": [member for member in range(LAST) if member % 5 == turn - 1]},
        do=Reply(tokens=4, token_seconds=60),
    )
    for turn in range(1, 6)
]
OF_ITSELF = 4 * 60.0  # seconds: so long does what hangs take to end, if nobody cancels it


def last_member(groups, reply):
    return Rule(match={"group": groups, "member": LAST}, do=reply)


ASKS = Reply(tokens=1, seconds=0.3)
WRONG = Reply(tokens=4, logprobs="fewer")
SCRIPT = EngineScript(rules=(last_member([0, 1], ASKS), *HANGS), default=Reply(tokens=4))
ENVIRONMENT = EnvironmentScript(
    prompts=4,
    rules=(EnvironmentRule(match={"group": [0, 1], "member": LAST}, do=Act(turns=(Turn(max_tokens=1),) * 400)),),
    default=Act(turns=(Turn(max_tokens=4),) * 5),
)
SETTINGS = {
    "run.steps": 100,
    "prompts.shuffle": False,
    "prompts.epochs": 1,
    "rollout.groups_per_batch": 1,
    "rollout.group_size": MEMBERS,
    "rollout.max_concurrent": 2 * MEMBERS,
    "rollout.max_staleness": 8,
    "rollout.steps_ahead": 8,
    "rollout.incomplete": "drop",
    "rollout.timeout_seconds": 0,
}


def cpu_seconds(pid):
    """What a process has used, by /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def hung(tmp_path_factory):
    """The run at its end, and the share of a core that its orchestrator used while everything hung."""
    with Stage(tmp_path_factory.mktemp("hung"), engines=[SCRIPT], environment=ENVIRONMENT, settings=SETTINGS) as stage:
        run = stage.start()

        def hanging():
            arrived = [entry for entry in stage.requests("arrived") if entry["member"] != LAST]
            return sum(entry["turn"] == entry["member"] % 5 + 1 for entry in arrived) == 2 * LAST

        stage.until(hanging, what="100 rollouts that hang")
        began, used = time.monotonic(), cpu_seconds(run.process.pid)
        stage.until(lambda: time.monotonic() > began + 1.5)
        share = (cpu_seconds(run.process.pid) - used) / (time.monotonic() - began)
        [engine] = stage.engines
        engine.set_rules([last_member(0, WRONG), last_member(1, ASKS), *HANGS])
        stage.until(lambda: any(entry["group"] == 2 for entry in stage.requests("arrived")), what="a group in the freed slots")
        engine.set_rules([last_member(1, WRONG)])
        ended = run.end()
        assert ended.code == 0, ended.err
        stage.check(ended)
        yield stage, share


def freed_at(stage):
    return {event.group: event.time for event in events_of(stage, GroupDropped)}


def test_C07_slots_that_come_free_are_taken_at_once_and_waiting_for_them_costs_nothing(hung):
    stage, share = hung
    assert share < 0.2
    admitted = {event.group: event.time for event in events_of(stage, Admitted)}
    assert admitted[2] >= freed_at(stage)[0]
    assert freed_at(stage)[1] > admitted[2]
    first = min(entry["time"] for entry in stage.requests("arrived") if entry["group"] == 2)
    assert first < freed_at(stage)[1], "the other slots that hang are not waited for"


def test_D07_what_is_cancelled_is_told_to_the_environment_and_to_the_engine_at_once(hung):
    stage, _ = hung
    freed = freed_at(stage)
    told = [entry for entry in stage.environment_entries("cancel") if entry["group"] in freed]
    assert len({(entry["group"], entry["member"]) for entry in told}) == 2 * LAST
    assert all(0 <= entry["time"] - freed[entry["group"]] < OF_ITSELF / 2 for entry in told)
    arrived = {entry["id"]: entry for entry in stage.requests("arrived")}
    left = [entry for entry in stage.requests("finished") if entry["disconnected"]]
    assert len({(arrived[entry["id"]]["group"], arrived[entry["id"]]["member"]) for entry in left}) == len(left) == 2 * LAST
    assert all(entry["time"] - freed[arrived[entry["id"]]["group"]] < OF_ITSELF / 2 for entry in left)


def test_D11_what_was_cancelled_at_any_turn_leaves_no_row_and_nothing_behind(hung):
    stage, _ = hung
    assert {group: cause for group, (cause, _) in dropped_groups(stage).items()} == {0: "incomplete", 1: "incomplete"}
    turns = [entry["turn"] for entry in stage.requests("arrived") if entry["group"] == 0 and entry["member"] != LAST]
    assert {turn: turns.count(turn) for turn in range(1, 6)} == {1: 50, 2: 40, 3: 30, 4: 20, 5: 10}
    rows = rows_of(stage)
    assert {row["group_id"] for row in rows} == {2, 3}
    assert all(len(sampled_of(row["samples"][0])) == 20 for row in rows)
    assert [row["rollouts"] for row in stage.rows("metrics.jsonl")] == [MEMBERS, MEMBERS]
    begun = [entry["id"] for entry in stage.requests("arrived")]
    assert sorted(begun) == sorted(entry["id"] for entry in stage.requests("finished"))
    opened, closed = (len(stage.environment_entries(what)) for what in ("reset", "close"))
    assert opened == closed == 4 * MEMBERS
    last = stage.rows("pipeline.jsonl")[-1]
    assert (last["rollouts_in_flight"], last["groups_running"], set(last["engine_load"].values())) == (0, 0, {0})
