"""Pictures of simulations and sweeps: what they are drawn from, that they are the same every time, and that no input breaks them."""

import struct
from functools import partial

import pytest

from headway.planning.draw_frontier import MOST_ROWS, draw_frontier, line_key
from headway.planning.draw_timeline import (
    BATCHES,
    KINDS,
    MOST_ENGINES,
    MOST_ENGINES_OF_EACH,
    MOST_PANELS,
    WORKING,
    draw_timeline,
    draw_timelines_of_each,
    kind_of,
    last_batches,
    window_of,
)
from headway.planning.paper import PALETTES, brief, png
from headway.planning.pictures import MISSING, bound_of, drawn_or_told, files_of, simulation_pictures, sweep_pictures
from headway.planning.scenario_file import load_scenario
from headway.planning.sweep import Outcome, Point, parse_sweep, points_of, run_points
from headway.sim.cohorts import step
from headway.sim.intervals import ENGINE, NO_BATCH, TRAINER
from headway.sim.summary import Interval

pytest.importorskip("matplotlib")

BASE = load_scenario(
    None,
    [
        'workload.tokens={kind = "lognormal", mean = 100, sigma = 1.5}',
        "training.seconds=2",
        "rollout.groups_per_batch=2",
        "rollout.group_size=2",
        "rollout.max_concurrent=32",
        "rollout.timeout_seconds=0",
        "run.steps=12",
    ],
)
INTERVALS = [
    Interval("trainer", 0.0, 5.0, "waiting", NO_BATCH["staleness"]),
    Interval("trainer", 5.0, 9.0, "training"),
    Interval("engine-0", 0.0, 8.0, "generating"),
    Interval("engine-0", 8.0, 9.0, "paused", ENGINE["weight sync"]),
    Interval("gate", 0.0, 1.0, "open"),
    Interval("gate", 1.0, 9.0, "closed", "staleness"),
]


def stepped(scenario):
    return step(scenario), ()


def size(data):
    """Width and height, as the file's head says."""
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


def test_a_simulation_has_three_pictures_on_two_papers_the_same_every_time():
    summary = step(BASE)
    files = files_of(simulation_pictures(BASE, summary, INTERVALS))
    assert set(files) == {f"{name}-{kind}.png" for name in ("staleness", "timeline", "lengths") for kind in PALETTES}
    assert all(width > 1000 for width, _ in map(size, files.values()))
    assert files == files_of(simulation_pictures(BASE, summary, INTERVALS))
    assert files["staleness-light.png"] != files["staleness-dark.png"]


def test_without_intervals_there_is_no_timeline():
    assert {picture.name for picture in simulation_pictures(BASE, step(BASE), [])} == {"staleness", "lengths"}


def test_a_sweep_has_a_frontier_and_histograms_also_with_gaps():
    outcomes = list(run_points(points_of(BASE, parse_sweep(["max_staleness=1,2", "steps_ahead=1,2"])), stepped))
    files = files_of(sweep_pictures(outcomes))
    assert set(files) == {f"{name}-{kind}.png" for name in ("frontier", "staleness") for kind in PALETTES}  # nobody knows who waited


def test_a_sweep_that_was_played_has_timelines_too():
    outcomes = [Outcome(Point({"run.seed": seed}, BASE), step(BASE), intervals=INTERVALS) for seed in (1, 2)]
    files = files_of(sweep_pictures(outcomes))
    assert {name for name in files if "timeline" in name} == {f"timeline-{kind}.png" for kind in PALETTES}


def test_a_frontier_of_many_points_keeps_to_a_page():
    summary = step(BASE)
    points = points_of(BASE, parse_sweep(["run.seed=0,1,2,3", "max_staleness=2,3,4,5,6", "on_stale=mask,train,drop", "steps_ahead=1,2"]))
    outcomes = [Outcome(point, summary) for point in points]
    figure = draw_frontier(outcomes, PALETTES["light"])
    assert max(figure.get_size_inches()) < 14
    assert len(figure.axes[1].get_yticks()) == MOST_ROWS < len(points)
    assert [text.get_text() for text in figure.legends[0].get_texts()][-1] == "and 13 more"


def test_a_sweep_without_figures_has_no_pictures():
    assert sweep_pictures([Outcome(Point({"run.seed": 1}, BASE), None, "nothing trained")]) == []


def test_names_that_look_like_formulas_are_drawn_as_they_are():
    outcome = Outcome(Point({"rollout.advantage": "$\\frac{$_<x>", "run.seed": 3}, BASE), step(BASE))
    assert len(sweep_pictures([outcome, Outcome(Point({"rollout.advantage": "grpo", "run.seed": 4}, BASE), step(BASE))])) == 2


@pytest.mark.parametrize(
    ("interval", "kind"),
    [
        (Interval("trainer", 0, 1, "training"), WORKING),
        (Interval("gate", 0, 1, "open"), WORKING),
        (Interval("gate", 0, 1, "closed", "concurrency"), "max_concurrent reached"),
        (Interval("trainer", 0, 1, "waiting", NO_BATCH["staleness"]), "gate closed by staleness"),
        (Interval("trainer", 0, 1, "waiting", NO_BATCH["concurrency"]), "max_concurrent reached"),
        (Interval("engine-0", 0, 1, "idle", ENGINE["concurrency"]), "max_concurrent reached"),
        (Interval("engine-0", 0, 1, "idle", ENGINE["environments"]), "environments"),
        (Interval("engine-0", 0, 1, "paused", ENGINE["weight sync"]), "weight sync"),
        (Interval("engine-0", 0, 1, "lost", "it is lost (a fault)"), "fault"),
        (Interval("trainer", 0, 1, "waiting", TRAINER["stalled"]), "fault"),
        (Interval("trainer", 0, 1, "waiting", TRAINER["a batch to be written"]), "something else"),
    ],
)
def test_causes_have_a_colour_of_their_own(interval, kind):
    assert kind in KINDS
    assert kind_of(interval) == kind


def test_the_window_is_that_of_the_last_batches():
    trainings = [Interval("trainer", 10.0 * k + 4, 10.0 * k + 10, "training") for k in range(30)]
    start, end = window_of(trainings)
    assert (start, end) == (trainings[-BATCHES - 1].end, 300.0)
    assert window_of(trainings[:3]) == (0.0, 30.0)


def test_of_a_large_fleet_some_engines_are_shown():
    crowd = [Interval(f"engine-{number}", 0.0, 9.0, "generating") for number in range(100)]
    axes = draw_timeline([*INTERVALS, *crowd], PALETTES["light"]).axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["trainer", *(f"engine-{number}" for number in range(MOST_ENGINES)), "gate"]
    assert f"{MOST_ENGINES} of 100 engines" in axes.get_xlabel()


def test_the_points_of_a_sweep_have_their_timelines_below_each_other_to_one_scale():
    late = [Interval(each.who, 1000 + each.start, 1000 + each.end, each.state, each.why) for each in INTERVALS]
    slow = [Interval(each.who, 2 * each.start, 2 * each.end, each.state, each.why) for each in INTERVALS]
    crowd = [Interval(f"engine-{number}", 0.0, 18.0, "generating") for number in range(1, 5)]
    figure = draw_timelines_of_each([("late", late), ("slow\nand large", [*slow, *crowd])], PALETTES["light"])
    first, second = figure.axes
    assert first.get_xlim() == second.get_xlim() == (0.0, 18.0)
    assert (first.get_title(loc="left"), second.get_title(loc="left")) == ("late", "slow  and large")
    assert [label.get_text() for label in first.get_yticklabels()] == ["trainer", "engine-0", "gate"]
    assert [label.get_text() for label in second.get_yticklabels()] == ["trainer", "engine-0", "engine-1", "gate"]
    assert [text.get_text().split()[0] for text in first.texts] == ["44%", "89%", "11%"]
    assert [text.get_text().split()[0] for text in second.texts] == ["44%", "89%", "100%", "11%"]
    assert f"{MOST_ENGINES_OF_EACH} of 5 engines" in figure.get_supxlabel()
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {WORKING, "gate closed by staleness", "weight sync"}


def test_of_many_points_the_first_have_timelines_and_it_is_said():
    figure = draw_timelines_of_each([(f"point {number}", INTERVALS) for number in range(30)], PALETTES["dark"])
    assert len(figure.axes) == MOST_PANELS
    assert f"the first {MOST_PANELS} of 30 points" in figure.get_supxlabel()


def test_a_timeline_keeps_what_the_last_batches_took():
    trainings = [Interval("trainer", 10.0 * k + 4, 10.0 * k + 10, "training") for k in range(30)]
    engine = [Interval("engine-0", 0.0, 195.0, "generating"), Interval("engine-0", 195.0, 300.0, "idle")]
    kept = last_batches([*trainings, *engine])
    assert kept == [*trainings[-BATCHES:], Interval("engine-0", 200.0, 300.0, "idle")]
    assert last_batches([]) == []


def test_the_key_with_the_most_values_runs_along_the_lines():
    assert line_key([{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 2, "b": 3}]) == "b"
    assert line_key([{"a": 1, "b": 1}, {"a": 2, "b": 2}]) == "a"


def test_what_keeps_to_no_bound_has_none_drawn():
    assert bound_of(BASE) == BASE.rollout.max_staleness
    assert bound_of(load_scenario(None, ["rollout.on_stale=train"], BASE)) is None


def test_only_a_missing_matplotlib_is_told_as_such():
    def missing(name):
        raise ImportError(f"No module named {name}", name=name)

    lines: list[str] = []
    assert drawn_or_told(lambda: missing("matplotlib.figure"), lines.append) == []
    assert lines == [MISSING]
    with pytest.raises(ImportError):
        drawn_or_told(lambda: missing("numpy.linalg"), lines.append)


def test_odd_grids_are_drawn_without_a_warning():
    tables = "workload.tokens={kind = 'lognormal', mean = 160, sigma = 0.5},{kind = 'mixture', parts = [[1, {kind = 'fixed', value = 3}]]}"
    for text in ("max_staleness=0", tables):
        outcomes = list(run_points(points_of(BASE, parse_sweep([text])), stepped))
        assert [size(png(partial(draw_frontier, outcomes), PALETTES["dark"]))[0]] == [1248]


def test_values_are_brief_where_there_is_little_room():
    assert brief({"kind": "lognormal", "mean": 1600, "sigma": 0.5}) == "lognormal 1600 0.5"
    assert brief({"kind": "mixture", "parts": [[1, {"kind": "fixed", "value": 3}]]}) == "mixture"
    assert brief("mask") == "mask"
    assert brief("x" * 100) == "x" * 17 + "..."
