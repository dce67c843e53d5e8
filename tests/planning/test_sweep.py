"""Sweeps: what a grid means, what is refused and what is left out, and the table that comes of it."""

import csv
import io
import json
from contextlib import suppress

import msgspec
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError, RunFailed
from headway.planning.scenario_file import load_scenario
from headway.planning.sweep import Outcome, parse_sweep, points_of, run_points
from headway.planning.sweep_table import figure_columns, sweep_csv, sweep_json, sweep_parquet, sweep_text
from headway.sim.cohort_scope import refusal
from headway.sim.cohorts import step
from headway.sim.summary import Staleness, Summary, Tokens

BASE = load_scenario(
    None,
    [
        'workload.tokens={kind = "lognormal", mean = 100, sigma = 1}',
        "training.seconds=2",
        "rollout.groups_per_batch=2",
        "rollout.group_size=2",
        "rollout.max_concurrent=32",
        "rollout.timeout_seconds=0",
        "run.steps=12",
    ],
)


def points(*texts, base=BASE, refused=lambda _: ""):
    return points_of(base, parse_sweep(texts), refused)


def names(found):
    return [point.name for point in found]


def stepped(scenario):
    return step(scenario), ()


def outcomes(*texts):
    return list(run_points(points(*texts), stepped))


def refused(*texts):
    with pytest.raises(ConfigError) as raised:
        points(*texts)
    return [str(raised.value), *filter(None, raised.value.detail.splitlines())]


def test_a_grid_is_every_combination_and_the_last_key_varies_fastest():
    expected = ["max_staleness=2 run.seed=0", "max_staleness=2 run.seed=1", "max_staleness=4 run.seed=0", "max_staleness=4 run.seed=1"]
    assert names(points("max_staleness=2,4", "run.seed=0,1")) == expected
    assert names(points("max_staleness=2,4 run.seed=0,1")) == expected
    assert names(points("  rollout.max_staleness=2,4,\n run.seed=0,1 ")) == expected


def test_a_point_is_what_set_would_make_of_it():
    found = points("max_staleness=2,4 rollout.on_stale=mask,drop workload.tokens.sigma=0.5")[1]
    same = ["rollout.max_staleness=2", "rollout.on_stale=drop", "workload.tokens.sigma=0.5"]
    assert found.scenario == load_scenario(None, same, BASE)


@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=5, unique=True), st.lists(st.integers(0, 99), min_size=1, max_size=5, unique=True)
)
def test_values_are_read_as_they_were_written(sizes, seeds):
    grid = parse_sweep([f"groups_per_batch={','.join(map(str, sizes))}", f"run.seed={','.join(map(str, seeds))}"])
    assert grid == {"rollout.groups_per_batch": sizes, "run.seed": seeds}
    found = points_of(BASE, {"run.seed": seeds, "rollout.max_ready_groups": sizes})
    assert [point.scenario.run.seed for point in found if point.scenario] == [seed for seed in seeds for _ in sizes]


@given(st.text(alphabet="ab=,. {}[]\"'\\\n1", max_size=30))
def test_no_text_is_more_than_refused(text):
    with suppress(ConfigError):
        points(text)
        return
    assert all(line.startswith("--sweep: ") for line in refused(text))


def test_commas_and_spaces_inside_tables_and_quotes_part_nothing():
    grid = parse_sweep(['workload.tokens={kind = "uniform", low = 1, high = 9},50 on_stale="mask",wait steps_ahead=1.5,auto'])
    assert grid == {
        "workload.tokens": [{"kind": "uniform", "low": 1, "high": 9}, 50],
        "rollout.on_stale": ["mask", "wait"],
        "rollout.steps_ahead": [1.5, "auto"],
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_stalenes=1", "--sweep: rollout.max_stalenes: no such key; did you mean rollout.max_staleness?"),
        ("seed=1", "--sweep: rollout.seed: no such key; did you mean run.seed?"),
        ("workload.tokens.sigmma=1", '--sweep: workload.tokens.sigmma: no such key of kind "lognormal"; did you mean sigma?'),
        ("max_staleness", '--sweep: "max_staleness" is not key=value,value: write it like --sweep max_staleness=1,2,4'),
        ("max_staleness=", "--sweep: rollout.max_staleness has no value: write it like --sweep max_staleness=1,2,4"),
        ("max_staleness=2,2", "--sweep: rollout.max_staleness has 2 twice: leave one out"),
        ("max_staleness=2 rollout.max_staleness=3", "--sweep: rollout.max_staleness is given twice: put all of its values into one"),
        ("max_staleness=2,many", '--sweep: rollout.max_staleness is "many": it must be a whole number, 0 or more'),
        ("budget.engines=2", "--sweep: budget.engines is what a plan keeps to: a simulation does not read it"),
        ("faults.engine=2", "--sweep: faults.engine is of a list of tables, which cannot be varied: simulate several scenarios"),
        (
            "run.seed=" + ",".join(map(str, range(10_001))),
            "--sweep: the grid has 10,001 points, at most 10,000 are simulated: leave values out",
        ),
        (" ", "--sweep: it names no key: write it like --sweep max_staleness=1,2,4"),
    ],
)
def test_a_mistake_is_one_line(text, said):
    assert refused(text) == [said]


def test_every_wrong_value_is_told():
    lines = refused("max_staleness=-1,2 groups_per_batch=0")
    assert [line.partition(":")[2].split(":")[0] for line in lines] == [" rollout.max_staleness is -1", " rollout.groups_per_batch is 0"]


def test_points_that_contradict_are_left_out_by_name_and_an_unset_steps_ahead_never_does():
    found = points("max_staleness=1,2,4", "steps_ahead=1,2")
    left_out = [point for point in found if point.scenario is None]
    assert names(left_out) == ["max_staleness=1 steps_ahead=2"]
    assert left_out[0].problem.startswith("rollout.steps_ahead is 2.0: at most rollout.max_staleness (1)")
    assert all(point.scenario for point in points("max_staleness=0,1,2,4"))


def test_a_grid_of_contradictions_is_refused_each_of_them_once():
    (line,) = refused("max_staleness=1", "steps_ahead=2", "run.seed=1,2")
    assert line.startswith("--sweep: max_staleness=1 steps_ahead=2 run.seed=1: rollout.steps_ahead is 2.0")


def test_what_a_section_lacks_is_told_of_its_point():
    (line,) = refused("eval.every=3")
    assert line.startswith("--sweep: eval.every=3: eval.prompts is missing")


def test_whoever_simulates_may_refuse():
    found = points("workload.tool_seconds=0,1 workload.turns=2", refused=refusal)
    assert [bool(point.scenario) for point in found] == [True, False]
    assert "workload.tool_seconds" in found[1].problem


def test_a_point_that_fails_keeps_none_from_going_on():
    def simulate(scenario):
        if scenario.run.seed == 1:
            raise RunFailed("no group trained")
        return stepped(scenario)

    found = list(run_points(points("run.seed=0,1,2"), simulate))
    assert [outcome.problem for outcome in found] == ["", "no group trained", ""]
    assert [outcome.summary is None for outcome in found] == [False, True, False]


def test_the_columns_are_all_scalar_figures_of_a_summary():
    scalars = {"int": int, "float": float, "str": str}

    def of(struct, prefix=""):
        return {f"{prefix}{field.name}" for field in msgspec.structs.fields(struct) if field.type in scalars.values()}

    assert set(figure_columns()) == of(Summary) | of(Tokens, "tokens_") | of(Staleness, "staleness_") | {"tokens_lost"}


def test_csv_and_parquet_hold_what_the_summaries_say_the_same_every_time():
    found = outcomes("max_staleness=1,2,4", "steps_ahead=1,2")
    assert (sweep_csv(found), sweep_parquet(found)) == (sweep_csv(outcomes("max_staleness=1,2,4 steps_ahead=1,2")), sweep_parquet(found))
    rows = list(csv.DictReader(io.StringIO(sweep_csv(found).decode())))
    table = pq.read_table(io.BytesIO(sweep_parquet(found))).to_pylist()
    assert len(rows) == len(table) == 6
    for outcome, row, values in zip(found, rows, table, strict=True):
        assert list(row) == list(values)
        assert values["rollout.max_staleness"] == outcome.point.values["rollout.max_staleness"]
        if outcome.summary is None:
            assert row["batches"] == ""
            assert values["batches"] is None
            assert row["problem"] == values["problem"] != ""
            continue
        assert float(row["batches_per_hour"]) == values["batches_per_hour"] == outcome.summary.batches_per_hour
        assert int(row["staleness_max"]) == values["staleness_max"] == outcome.summary.staleness.max
        assert int(row["tokens_lost"]) == sum(outcome.summary.tokens.lost.values())
        assert row["by"] == "cohorts"


def test_a_key_of_numbers_and_words_is_a_column_of_texts():
    found = [Outcome(point, None, "not simulated") for point in points("steps_ahead=1,auto max_staleness=2,4")]
    table = pq.read_table(io.BytesIO(sweep_parquet(found)))
    assert table["rollout.steps_ahead"].to_pylist() == ["1", "1", "auto", "auto"]
    assert table["rollout.max_staleness"].to_pylist() == [2, 4, 2, 4]


def test_json_holds_whole_summaries():
    found = outcomes("max_staleness=1,2", "steps_ahead=2")
    first, second = json.loads(sweep_json(found))
    assert first["point"] == {"rollout.max_staleness": 1, "rollout.steps_ahead": 2}
    assert first["summary"] is None
    assert msgspec.convert(second["summary"], Summary, strict=False) == found[1].summary


def test_the_table_for_a_terminal_is_aligned_ascii():
    found = outcomes("max_staleness=1,2,8", "steps_ahead=1,2")
    lines = sweep_text("r\xe9sum\xe9", found, 6).splitlines()
    assert lines[0] == "r\\xe9sum\\xe9: 6 points (cohorts)"
    assert lines[2].split()[:4] == ["max_staleness", "steps_ahead", "batches/h", "tokens/s"]
    assert {len(line) for line in lines[2:9]} == {len(lines[2])}
    assert lines[4].split()[:4] == ["1", "2", "-", "-"]
    assert sweep_text("cut", found[:2], 6).startswith("cut: 2 of 6 points (cohorts)")
