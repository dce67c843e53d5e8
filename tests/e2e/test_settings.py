"""Configurations at their edges: each run ends as it should, within its bound, with closed books."""

import json

import pytest
from real_runs import Bench, Ended, audit, history

from headway.events import Published

pytestmark = [pytest.mark.e2e, pytest.mark.torch]


def staleness(ended: Ended) -> set[int]:
    return {row["token_staleness_max"] for row in ended.rows("metrics.jsonl")}


def test_generating_and_training_in_turn_leaves_no_token_stale(bench: Bench):
    ended = bench.play("rollout.max_staleness=0", "rollout.steps_ahead=0", "environment.workers=0")
    assert ended.code == 0, ended.err
    audit(ended, max_staleness=0)
    assert staleness(ended) == {0}


def test_the_smallest_groups_batches_and_concurrency_there_can_be_and_a_fraction_of_a_step_ahead(bench: Bench):
    settings = ["rollout.group_size=2", "rollout.groups_per_batch=1", "rollout.max_concurrent=2", "rollout.steps_ahead=0.4"]
    ended = bench.play(*settings, "rollout.max_staleness=1")
    assert ended.code == 0, ended.err
    audit(ended, max_staleness=1)


def test_fewer_prompts_than_batches_end_in_a_smaller_batch(bench: Bench):
    ended = bench.play("prompts.epochs=1", "run.steps=50", "rollout.groups_per_batch=4", "environment.workers=3")
    assert (ended.code, ended.recorded["cause"]) == (0, "the prompts are used up"), ended.err
    ledger = audit(ended, max_staleness=2)
    assert ledger.admitted == 10
    assert sum(row["groups"] for row in ended.rows("metrics.jsonl")) + ledger.alike + sum(ledger.dropped.values()) >= 8


def test_an_endless_generator_feeds_a_run(bench: Bench):
    bench.world("def endless():\n    return ({'id': str(n)} for n in itertools.count())\n")
    ended = bench.play("prompts.source=world:endless", "prompts.shuffle=false")
    assert ended.code == 0, ended.err
    assert audit(ended, max_staleness=2).admitted >= 9


def test_any_character_in_a_line_of_prompts_reaches_the_environment(bench: Bench):
    rows = [{"id": f"a\u2028b{n}", "said": "one\u2028two\u0085three \U0001f600 \\n"} for n in range(4)]
    (bench.directory / "prompts.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8")
    bench.world("async def said(prompt, policy):\n    return Outcome(await play(policy), metadata={'said': prompt.fields['said']})\n")
    ended = bench.play("prompts.source=prompts.jsonl", "environment.entry=world:said")
    assert ended.code == 0, ended.err
    audit(ended, max_staleness=2)


def test_every_version_that_is_served_can_be_evaluated_and_held_for_that(bench: Bench):
    ended = bench.play("eval.every=1", "eval.prompts=world:prompts", "eval.limit=3", "eval.at_start=true", "eval.hold_seconds=60")
    assert ended.code == 0, ended.err
    audit(ended, max_staleness=2)
    rows = ended.rows("eval.jsonl")
    served = [event.version for event in history(ended) if isinstance(event, Published)]
    assert [row["version"] for row in rows] == served  # a version that is overtaken while an evaluation holds the sync is never served
    assert served[0] == 0
    assert served[-1] == 3
    assert not any(row["mixed"] for row in rows)
    assert all(row["ok"] == 3 for row in rows)
