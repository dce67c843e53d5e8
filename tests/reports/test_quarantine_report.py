"""`headway inspect RUN quarantine`: every prompt that was given up, with its reason, and those that are on the way there."""

import json

from run_directories import write_run

from headway.cli import command_line
from headway.cli.inspect_text import quarantine_text
from headway.events import Admitted, GroupDropped, PromptDropped, Ready, RolloutDropped
from headway.reports.quarantine import quarantine_report
from headway.reports.run_files import open_run
from headway.settings import RolloutSection, RunSection
from headway.sim.run import WorldSettings, simulate
from headway.sim.worker import RolloutSettings


def failed(group, prompt, *causes, epoch=0):
    members = [RolloutDropped(0.0, group, n, 0, cause, f"{cause} happened\nand more", 1, final=True) for n, cause in enumerate(causes)]
    return [Admitted(0.0, group, prompt, epoch, 2, 0), *members, GroupDropped(0.0, group, "incomplete", "", 0)]


def report_of(tmp_path, *events):
    result = simulate(WorldSettings(), RolloutSection(groups_per_batch=2, group_size=4, max_concurrent=16), RunSection(steps=1))
    assert isinstance(result.events, list)
    result.events[:] = events
    return quarantine_report(open_run(write_run(tmp_path / "run", result, RolloutSection())))


def test_a_prompt_in_quarantine_stands_with_its_reason_and_with_what_its_groups_were_lost_to(tmp_path):
    gone = PromptDropped(7.0, "p", 1, "quarantined", "2 groups of it in a row lost too many members", 2)
    report = report_of(tmp_path, *failed(0, "p", "timeout", "timeout"), *failed(1, "p", "bad_reward", epoch=1), gone)
    (prompt,) = report.quarantined
    assert (prompt.prompt_id, prompt.epoch, prompt.failures, prompt.time) == ("p", 1, 2, 7.0)
    assert (prompt.lost_to, prompt.last_loss) == ({"timeout": 2, "bad_reward": 1}, "bad_reward: bad_reward happened")
    assert (report.missing, report.failing) == ([], {})


def test_prompts_that_fail_at_present_are_counted_and_a_good_group_clears_them(tmp_path):
    again = [*failed(0, "p", "timeout"), *failed(1, "q", "timeout"), *failed(2, "q", "timeout")]
    assert report_of(tmp_path / "a", *again).failing == {"q": 2, "p": 1}
    cleared = [*again, Admitted(0.0, 3, "q", 0, 2, 0), Ready(0.0, 3, zero_advantage=False)]
    assert report_of(tmp_path / "b", *cleared).failing == {"p": 1}


def test_what_the_source_has_lost_is_told_apart(tmp_path):
    report = report_of(tmp_path, PromptDropped(0.0, "p", 0, "missing", "the prompt source no longer has it"))
    assert (report.quarantined, [prompt.prompt_id for prompt in report.missing]) == ([], ["p"])
    assert "no longer has them:\n        p (epoch 0)" in quarantine_text(report)


def test_whatever_ids_and_environments_say_the_text_is_ascii_of_80_columns(tmp_path):
    odd = "p\u00e4 \u4e16" * 60
    events = [*failed(0, odd, "timeout"), PromptDropped(0.0, odd, 0, "quarantined", odd, 1), *failed(1, odd, "timeout")]
    text = quarantine_text(report_of(tmp_path, *events, PromptDropped(0.0, odd, 1, "missing", odd)))
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 80


def test_a_run_with_a_poison_prompt_lists_it(tmp_path, capsys):
    section = RolloutSection(groups_per_batch=2, group_size=2, max_concurrent=16, max_attempts=1, max_prompt_failures=2)
    rollouts = RolloutSettings(reward=lambda prompt, member, chance: None if prompt.fields["number"] == 3 else chance)
    result = simulate(WorldSettings(rollouts=rollouts, prompts=10, epochs=3), section, RunSection(steps=1000))
    path = write_run(tmp_path / "run", result, section)
    assert command_line(["inspect", str(path), "quarantine", "--json"]) == 0
    (prompt,) = json.loads(capsys.readouterr().out)["quarantined"]
    assert (prompt["prompt_id"], prompt["failures"], prompt["lost_to"]) == ("prompt-3", 2, {"bad_reward": 4})
    assert command_line(["inspect", str(path), "quarantine"]) == 0
    assert "1 prompt in quarantine\n\nprompt-3 (epoch 1): 2 groups of it in a row lost too many" in capsys.readouterr().out
