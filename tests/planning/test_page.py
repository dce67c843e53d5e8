"""The pages of simulations and sweeps: whole HTML, nothing loaded from anywhere, everything from outside escaped."""

import base64
import re
from html.parser import HTMLParser

import pytest

from headway.planning.page import simulation_page, sweep_page
from headway.planning.pictures import MISSING, Picture
from headway.planning.scenario_file import load_scenario
from headway.planning.sweep import Outcome, Point, parse_sweep, points_of, run_points
from headway.sim.cohorts import step

BASE = load_scenario(
    None,
    [
        "workload.tokens=100",
        "training.seconds=2",
        "rollout.groups_per_batch=2",
        "rollout.group_size=2",
        "rollout.max_concurrent=32",
        "run.steps=12",
    ],
)
HOSTILE = "<script>alert('1')</script>\"&{{ 7 * 7 }}</title>"
PNG = b"\x89PNG not really"
PICTURES = [Picture("staleness", "How stale <b>", f"caption {HOSTILE}", {"light": PNG, "dark": PNG + b"!"})]
VOID = {"meta", "source", "img"}


class Page(HTMLParser):
    """Notes tags that do not match, what is loaded, and what is read."""

    def __init__(self, html):
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.cells: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in {"src", "href", "srcset", "action", "data"}]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
        if self.open[-1:] == ["td"]:
            self.cells.append(data)


def checked(html):
    """Read a page that must open offline."""
    page = Page(html)
    assert page.open == []
    assert html.startswith("<!doctype html>")
    assert all(loaded.startswith("data:image/png;base64,") for loaded in page.loaded)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", html)
    assert "script" not in page.tags
    assert "link" not in page.tags
    html.encode()
    return page


@pytest.fixture(scope="module")
def summary():
    return step(BASE)


@pytest.fixture(scope="module")
def outcomes():
    return list(run_points(points_of(BASE, parse_sweep(["max_staleness=1,2,4", "steps_ahead=1,2"])), lambda scenario: (step(scenario), ())))


def test_a_simulation_opens_offline_with_its_pictures_and_figures(summary):
    page = checked(simulation_page("math", BASE, summary, PICTURES, "the report"))
    assert [base64.b64decode(loaded.partition(",")[2]) for loaded in page.loaded] == [PNG + b"!", PNG]
    text = " ".join(page.words)
    for figure in (f"{summary.batches_per_hour:,.1f}", f"{summary.trained_tokens_per_second:,.0f}", "the report", "max_staleness = 8"):
        assert figure in text
    assert f"{summary.tokens.sampled:,}" in page.cells
    assert MISSING not in text


def test_both_papers_are_there(summary):
    html = simulation_page("math", BASE, summary, PICTURES, "")
    assert html.count("prefers-color-scheme: dark") == 2
    assert 'name="color-scheme" content="light dark"' in html


def test_what_comes_from_outside_is_escaped(summary):
    page = checked(simulation_page(HOSTILE, BASE, summary, PICTURES, HOSTILE))
    assert "".join(page.words).count(HOSTILE) == 4  # the title twice, a caption, the report
    assert "".join(page.words).count("49") == "".join(checked(simulation_page("x", BASE, summary, [], "")).words).count("49")


def test_a_name_that_is_no_text_is_shown_all_the_same(summary):
    assert "\\udcff" in "".join(checked(simulation_page("name-\udcff", BASE, summary, [], "")).words)


def test_without_pictures_one_line_says_what_is_missing(summary, outcomes):
    for html in (simulation_page("math", BASE, summary, [], ""), sweep_page("math", BASE, outcomes, [])):
        assert "".join(checked(html).words).count(MISSING) == 1


def test_a_sweep_opens_offline_with_every_point(outcomes):
    page = checked(sweep_page("math", BASE, outcomes, PICTURES))
    assert len(page.cells) == len(outcomes) * 12
    for outcome in outcomes:
        if outcome.summary:
            assert f"{outcome.summary.trained_tokens_per_second:,.0f}" in page.cells
    text = " ".join(page.words)
    assert "6 points over max_staleness, steps_ahead" in text
    assert "max_staleness=1 steps_ahead=2: rollout.steps_ahead is 2.0" in text
    assert "6 of 9 points" in " ".join(checked(sweep_page("math", BASE, outcomes, PICTURES, 9)).words)


def test_values_and_problems_of_points_are_escaped():
    outcome = Outcome(Point({"rollout.advantage": HOSTILE}, None, HOSTILE), None, HOSTILE)
    page = checked(sweep_page(HOSTILE, BASE, [outcome], []))
    assert HOSTILE in "".join(page.cells)


def test_the_same_figures_make_the_same_page(summary, outcomes):
    assert simulation_page("a", BASE, summary, PICTURES, "") == simulation_page("a", BASE, summary, PICTURES, "")
    assert sweep_page("a", BASE, outcomes, PICTURES) == sweep_page("a", BASE, outcomes, PICTURES)
