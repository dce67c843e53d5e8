"""`headway inspect`: what a person sees of a run that is over or goes on, and what is said of a directory that is none."""

import json
import sqlite3
import sys

import pytest
from run_directories import RUN_ID, run_info, strictly, write_run

from headway.adapters.journal.sqlite import SqliteJournal
from headway.cli import command_line
from headway.formats.run_directory import RunDirectory, save_run_info
from headway.protocols import Entry
from headway.settings import RolloutSection, RunSection
from headway.sim.distributions import Lognormal
from headway.sim.run import WorldSettings, simulate
from headway.sim.worker import Fault, RolloutSettings

REPORTS = ["staleness", "waste", "bias", "quarantine"]


def section(**more):
    return RolloutSection(**{"groups_per_batch": 4, "group_size": 4, "max_concurrent": 200, "max_staleness": 2, "steps_ahead": 2} | more)


@pytest.fixture(scope="module")
def result():
    rollouts = RolloutSettings(seconds=Lognormal(1.0, 1.0), turns=2, faults=(Fault("environment_error", 0.1),))
    return simulate(WorldSettings(rollouts=rollouts, prompts=30), section(), RunSection(steps=30))


@pytest.fixture(scope="module")
def run(result, tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "one", result, section())


def inspected(capsys, *arguments):
    code = command_line(["inspect", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("what", REPORTS)
def test_a_report_is_plain_text_for_80_columns(what, run, capsys):
    code, out, err = inspected(capsys, run, what)
    assert (code, err) == (0, "")
    assert out.isascii()
    assert max(map(len, out.splitlines())) <= 80
    assert out.startswith("run simulated, ended: ")


@pytest.mark.parametrize("what", REPORTS)
def test_a_report_as_json_is_strict_and_says_the_same(what, run, capsys):
    code, out, _ = inspected(capsys, run, what, "--json")
    assert code == 0
    assert strictly(out)["run"] == "simulated"


@pytest.mark.parametrize("what", REPORTS)
def test_reading_leaves_no_trace_and_takes_no_lock(what, result, tmp_path, capsys):
    path = write_run(tmp_path / "run", result, section(), ended=False)
    owner = RunDirectory(path)
    owner._acquire()
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    code, out, _ = inspected(capsys, path, what)
    owner.close()
    assert code == 0
    assert "not ended" in out
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_staleness_adds_up_the_rows_of_all_batches(run, result, capsys):
    _, out, _ = inspected(capsys, run, "staleness", "--json")
    report = strictly(out)
    figures = report["staleness"]
    kept = result.batches.values()
    tokens = [sum(batch.tokens.get(staleness, 0) for batch in kept) for staleness in range(3)]
    assert figures["histogram"] == tokens
    assert figures["contributing_tokens"] == sum(tokens)
    assert figures["masked_tokens"] == sum(sum(batch.masked.values()) for batch in kept) == sum(figures["masked_histogram"].values()) > 0
    assert figures["tokens"]["mean"] == pytest.approx((tokens[1] + 2 * tokens[2]) / sum(tokens))
    assert figures["tokens"]["max"] == figures["heads"]["max"] == 2
    assert figures["in_flight_mean"] + figures["queued_mean"] == pytest.approx(figures["tokens"]["mean"])
    assert figures["in_flight_share"] + figures["queued_share"] == pytest.approx(1)
    whole = sum(batch.whole_heads for batch in kept) / sum(batch.rollouts for batch in kept)
    assert figures["head_coverage"] == pytest.approx(whole)
    [environment] = figures["environments"]
    assert environment["head_coverage"] == pytest.approx(whole)
    assert len(environment["by_length"]) == 10
    assert report["batches"] == 30
    assert [batch["batch"] for batch in report["last_batches"]] == list(range(22, 30))


def test_the_histogram_has_the_bound_drawn_in_it(run, capsys):
    _, out, _ = inspected(capsys, run, "staleness")
    lines = out.splitlines()
    [bound] = [number for number, line in enumerate(lines) if "max_staleness = 2" in line]
    above = [line.split()[0] for line in lines[bound - 3 : bound]]
    assert above == ["0", "1", "2"]
    assert "#" in lines[bound - 1]
    assert "#" not in lines[bound + 1]
    assert lines[bound + 1].split()[0] == "3"
    assert "." in lines[bound + 1].split()[-1]


def test_without_a_bound_the_share_over_it_is_told(tmp_path, capsys):
    rollout = section(on_stale="train")
    result = simulate(WorldSettings(rollouts=RolloutSettings(seconds=Lognormal(1.0, 1.0))), rollout, RunSection(steps=10))
    path = write_run(tmp_path / "run", result, rollout)
    _, out, _ = inspected(capsys, path, "staleness")
    assert "trained on over max_staleness: " in out
    share = strictly(inspected(capsys, path, "staleness", "--json")[1])["staleness"]["share_over_bound"]
    tokens = [count for batch in result.batches.values() for count in batch.tokens.items()]
    assert share == pytest.approx(sum(count for age, count in tokens if age > 2) / sum(count for _, count in tokens))
    assert share > 0


def test_a_picture_is_drawn(run, tmp_path, capsys):
    picture = tmp_path / "staleness.png"
    assert inspected(capsys, run, "staleness", "--picture", picture)[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_says_what_to_install(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = inspected(capsys, run, "staleness", "--picture", tmp_path / "x.png")
    assert (code, err) == (2, "headway: --picture needs matplotlib, which is not installed: pip install matplotlib\n")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["staleness", "--picture", "x.nothing"], 2, "x.nothing: Format 'nothing' is not supported"),
        (["staleness", "--picture", "none/x.png"], 1, "none/x.png: cannot be written: No such file or directory"),
        (["waste", "--picture", "x.png"], 2, "--picture: there is none of waste, only of staleness"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_one_line(arguments, code, says, run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, _, err = inspected(capsys, run, *arguments)
    assert found == code
    assert says in err
    assert err.count("\n") == 1


def test_waste_adds_up_to_what_the_engines_count(run, result, capsys):
    code, out, _ = inspected(capsys, run, "waste")
    assert code == 0
    assert f"{result.sampled_tokens:>14,}           in all" in out
    assert f"{result.sampled_tokens:>14,}           by the engines' own count" in out
    assert "environment_error" in out


def test_books_that_do_not_close_end_with_1(result, tmp_path, capsys):
    path = write_run(tmp_path / "run", result, section(), counted=False)
    with (path / "pipeline.jsonl").open("a") as file:
        file.write('{"time": 1e9, "engine_sampled_tokens": 7}\n')
    code, out, _ = inspected(capsys, path, "waste")
    assert code == 1
    assert "THE BOOKS DO NOT CLOSE: the engines count 7 sampled tokens" in out


def damage(name, change):
    def damaged(path):
        file = path / name
        file.write_bytes(change(file.read_bytes()))

    return damaged


def forget_an_event(path):
    connection = sqlite3.connect(path / "state" / "events.sqlite")
    connection.execute("DELETE FROM events WHERE sequence = 7")
    connection.commit()
    connection.close()


def change_an_event(path):
    connection = sqlite3.connect(path / "state" / "events.sqlite")
    connection.execute("UPDATE events SET event = replace(event, '\"member\":1', '\"member\":2')")
    connection.commit()
    connection.close()


def belongs_to_another(path):
    connection = sqlite3.connect(path / "state" / "events.sqlite")
    connection.execute("UPDATE header SET value = 'somebody' WHERE key = 'run_id'")
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("what", "damaged", "code", "says"),
    [
        ("staleness", lambda path: (path / "run.json").unlink(), 2, "not a run directory: it holds no run.json"),
        ("staleness", damage("run.json", lambda data: data[:40]), 1, "run.json: is damaged"),
        ("staleness", damage("config.toml", lambda data: data.replace(b"[rollout]", b"[rollou")), 1, "config.toml: is damaged"),
        ("bias", damage("config.toml", lambda data: b""), 1, "config.toml: is damaged: rollout is missing"),
        ("staleness", damage("metrics.jsonl", lambda data: b"{" + data), 1, "metrics.jsonl: line 1 is damaged"),
        (
            "staleness",
            damage("metrics.jsonl", lambda data: data.replace(b'"masked_staleness_histogram"', b'"x"')),
            1,
            "is damaged: masked_",
        ),
        ("staleness", damage("metrics.jsonl", lambda data: data.replace(b'"token_staleness_histogram"', b'"x"')), 1, "an older headway"),
        ("staleness", damage("metrics.jsonl", lambda _: b""), 1, "no batch has been trained yet"),
        ("waste", damage("pipeline.jsonl", lambda data: b"nonsense\n" + data), 1, "pipeline.jsonl: line 1 is damaged"),
        ("waste", lambda path: (path / "state" / "events.sqlite").unlink(), 1, "events.sqlite: no such file"),
        ("waste", damage("state/events.sqlite", lambda _: b"not a database at all" * 100), 1, "events.sqlite: cannot be read"),
        ("waste", forget_an_event, 1, "is damaged: event 7 is missing"),
        ("bias", change_an_event, 1, "does not match its checksum"),
        ("bias", belongs_to_another, 1, "belongs to run somebody"),
    ],
)
def test_what_cannot_be_read_is_named_in_one_line(what, damaged, code, says, result, tmp_path, capsys):
    path = write_run(tmp_path / "run", result, section())
    damaged(path)
    found, out, err = inspected(capsys, path, what)
    assert (found, out) == (code, "")
    assert err.startswith("headway: ")
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("what", REPORTS)
def test_a_path_that_is_no_run_ends_with_2(what, tmp_path, capsys):
    assert inspected(capsys, tmp_path / "none", what)[0::2] == (2, f"headway: {tmp_path}/none: no such directory\n")
    code, _, err = inspected(capsys, tmp_path, what)
    assert (code, err) == (2, f"headway: {tmp_path}: not a run directory: it holds no run.json\n")


def test_a_report_that_there_is_none_of_ends_with_2(run, capsys):
    code, _, err = inspected(capsys, run, "everything")
    assert code == 2
    assert "'everything' is not one of 'staleness', 'waste', 'bias'" in err


async def test_a_run_that_has_just_begun_has_no_staleness_and_no_bias(run, tmp_path, capsys):
    begun = RunDirectory.create(tmp_path / "run")
    save_run_info(begun, run_info(ended=False))
    begun.config.write_bytes((run / "config.toml").read_bytes())
    journal = SqliteJournal(begun.state, run_id=RUN_ID)
    codes = {what: inspected(capsys, begun.path, what) for what in REPORTS}
    await journal.close()
    begun.close()
    assert (codes["staleness"][0], codes["bias"][0]) == (1, 1)
    assert "no batch has been trained yet" in codes["staleness"][2]
    assert "no rollout has finished yet" in codes["bias"][2]
    assert codes["waste"][0] == 0
    assert "The engines do not say" in codes["waste"][1]


async def test_a_journal_is_read_while_its_run_writes(run, result, tmp_path, capsys):
    begun = RunDirectory.create(tmp_path / "run")
    save_run_info(begun, run_info(ended=False))
    begun.config.write_bytes((run / "config.toml").read_bytes())
    journal = SqliteJournal(begun.state, run_id=RUN_ID)
    delivered = []
    for start in range(0, len(result.events), 500):
        await journal.append([Entry(event) for event in result.events[start : start + 500]])
        delivered.append(strictly(inspected(capsys, begun.path, "waste", "--json")[1])["delivered_tokens"])
    await journal.close()
    begun.close()
    assert delivered == sorted(set(delivered))
    assert delivered[-1] == strictly(inspected(capsys, run, "waste", "--json")[1])["delivered_tokens"]


def test_a_line_that_is_being_written_is_not_read_yet(result, tmp_path, capsys):
    path = write_run(tmp_path / "run", result, section())
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"batch": 30, "tok')
    code, out, _ = inspected(capsys, path, "staleness", "--json")
    assert code == 0
    assert json.loads(out)["batches"] == 30


def test_a_state_directory_elsewhere_is_found(result, tmp_path, capsys):
    path = write_run(tmp_path / "run", result, section(), state=str(tmp_path / "state"))
    assert inspected(capsys, path, "waste")[0] == 0
