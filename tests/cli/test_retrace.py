"""`headway retrace`: a journal is played again, stops where asked, and a divergence is told, with exit code 1."""

from dataclasses import replace

import msgspec
import pytest
from run_directories import run_info, strictly, write_journal, write_run

from headway.cli import command_line
from headway.events import BatchFormed, ConfigChanged, Published
from headway.formats.run_directory import RunDirectory, save_run_info
from headway.settings import RolloutSection, RunSection
from headway.sim.distributions import Lognormal
from headway.sim.run import WorldSettings, simulate
from headway.sim.worker import RolloutSettings
from headway.sim.world import Kill

ROLLOUT = RolloutSection(groups_per_batch=4, group_size=2, max_concurrent=40, max_staleness=2, steps_ahead=2)


@pytest.fixture(scope="module")
def result():
    world = WorldSettings(rollouts=RolloutSettings(seconds=Lognormal(1.0, 1.0)))
    return simulate(world, ROLLOUT, RunSection(steps=20), kills=[Kill(at=8.0)])


@pytest.fixture(scope="module")
def run(result, tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "one", result, ROLLOUT)


def with_history(result, events):
    return replace(result, events=events)


def retraced(capsys, *arguments):
    code = command_line(["retrace", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_whole_journal(run, result, capsys):
    code, out, err = retraced(capsys, run)
    assert (code, err) == (0, "")
    assert out.isascii()
    assert max(map(len, out.splitlines())) <= 100
    assert out.startswith(f"run simulated, ended: {len(result.events):,} events played, taken up again 1 time\n")
    assert "the journal ends here" in out
    assert out.endswith("no divergence: the rules decide as the journal says\n")


def test_twice_the_same(run, capsys):
    assert retraced(capsys, run, "--json") == retraced(capsys, run, "--json")


def test_it_stops_before_a_batch_a_version_or_after_so_many_events(run, result, capsys):
    _, out, _ = retraced(capsys, run, "--json", "--until-batch", 5)
    report = strictly(out)
    assert report["next"]["event"] == "batch_formed"
    assert report["next"]["fields"]["k"] == report["state"]["next_batch"] == 5
    place = next(index for index, event in enumerate(result.events) if isinstance(event, BatchFormed) and event.k == 5)
    assert report["events"] == report["next"]["number"] == place
    assert report["before"][-1]["number"] == place - 1
    assert sum(report["state"]["ready"].values()) >= 4
    assert report["state"]["trainer_waits_for"] is not None
    _, out, _ = retraced(capsys, run, "--json", "--until-version", 7)
    report = strictly(out)
    assert report["next"]["event"] == "published"
    assert report["next"]["fields"]["version"] >= 7 > report["state"]["version"]
    _, out, _ = retraced(capsys, run, "--json", "--until-event", 10)
    report = strictly(out)
    assert (report["events"], report["next"]["number"]) == (10, 10)
    report = strictly(retraced(capsys, run, "--json", "--until-event", 0)[1])
    assert report["events"] == 0
    assert report["state"]["capacity"] is not None  # by a config that was in force from the first event on


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--until-batch", "99"], "batch 99 was never formed: the last is 19"),
        (["--until-version", "99"], "version 99 was never published: the last is 20"),
        (["--until-event", "999999"], "events, not 999999"),
        (["--until-event", "3", "--until-batch", "2"], "give one of them"),
    ],
)
def test_what_is_not_there_is_one_line(asked, said, run, capsys):
    code, out, err = retraced(capsys, run, *asked)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_a_journal_that_was_changed(result, tmp_path, capsys):
    events = [
        msgspec.structs.replace(event, version=40) if isinstance(event, Published) and event.version == 6 else event
        for event in result.events
    ]
    path = write_run(tmp_path / "run", with_history(result, events), ROLLOUT)
    code, out, err = retraced(capsys, path)
    assert (code, err) == (1, "")
    assert "divergence" in out
    assert "version 40 is published after 5" in out
    code, out, _ = retraced(capsys, path, "--json")
    report = strictly(out)
    assert code == 1
    assert report["diverged"] >= len(report["divergences"]) >= 1
    assert report["divergences"][0]["event"] == "published"


def test_a_journal_that_contradicts_itself_ends_there(result, tmp_path, capsys):
    place = next(index for index, event in enumerate(result.events) if isinstance(event, BatchFormed) and event.k == 4)
    events = [*result.events[:place], *result.events[place + 1 :]]
    code, out, _ = retraced(capsys, write_run(tmp_path / "run", with_history(result, events), ROLLOUT), "--json")
    report = strictly(out)
    assert code == 1
    assert any("contradicts what came before" in one["said"] for one in report["divergences"])
    assert report["next"] is not None


def test_what_was_decided_under_another_config_is_not_judged_by_this_one(result, tmp_path, capsys):
    other = msgspec.structs.replace(ROLLOUT, max_concurrent=4)
    path = write_run(tmp_path / "strict", result, other)
    assert retraced(capsys, path)[0] == 1
    told = ConfigChanged(result.events[-1].time, ("rollout.max_concurrent",))
    path = write_run(tmp_path / "changed", with_history(result, [*result.events, told]), other)
    code, out, _ = retraced(capsys, path)
    assert code == 0
    assert f"{len(result.events):,} of them were decided under a config that is not kept" in out


def test_an_empty_journal_and_what_is_no_run(tmp_path, capsys):
    path = tmp_path / "run"
    run = RunDirectory.create(path)
    save_run_info(run, run_info(ended=False))
    run.config.write_text('[run]\nname = "empty"\nsteps = 3\nstate_directory = ""\n[rollout]\n')
    write_journal(run.state, [])
    run.close()
    code, _, err = retraced(capsys, path)
    assert code == 2
    assert err == f"headway: {path}/state: the journal is empty: nothing has happened in this run yet\n"
    code, _, err = retraced(capsys, tmp_path / "none")
    assert code == 2
    assert "no such directory" in err
