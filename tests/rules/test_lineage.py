"""Labels are ours or not; the fleet serves its oldest version; a new line inherits up to the fork and no further."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.rules.lineage import Label, Line, belongs, line_of, parse_label, served_version

NAMES = st.text("0123456789abcdef_.", min_size=1, max_size=8)


@given(NAMES, st.integers(0, 10**17))
def test_a_label_reads_back_as_it_was_written(lineage, version):
    label = Label(lineage, version)
    assert str(label) == f"{lineage}-{version}"
    assert parse_label(str(label)) == label


@pytest.mark.parametrize(
    "label",
    [
        "default",
        "",
        "-3",
        "ab-",
        "ab-x",
        "ab--1",
        "ab-01",
        "ab-1.0",
        "ab-1 ",
        " ab-1",
        "a b-1",
        "ab-1\n",
        "ab-٣",
        "ab-+1",
        "models/ab-c",
        "a-b-1",
    ],
)
def test_any_other_label_is_not_ours(label):
    assert parse_label(label) is None


@given(st.text(max_size=12))
def test_what_is_ours_is_written_in_one_way_only(label):
    parsed = parse_label(label)
    assert parsed is None or str(parsed) == label


@given(st.lists(st.integers(0, 50), max_size=8))
def test_the_served_version_is_the_oldest_that_any_engine_serves(versions):
    assert served_version(versions) == (sorted(versions)[0] if versions else -1)


def test_a_first_lineage_has_its_own_versions_only():
    line = line_of("a", {"a": None})
    assert line == Line("a") == line_of("a", {})
    assert belongs("a", 10**6, line)
    assert not belongs("b", 0, line)


def test_a_new_lineage_inherits_its_parents_versions_up_to_the_fork():
    line = line_of("b", {"a": None, "b": "a-7"})
    assert [belongs("a", version, line) for version in (0, 7, 8)] == [True, True, False]
    assert belongs("b", 8, line)


def test_an_ancestor_counts_up_to_the_oldest_fork_on_the_way():
    parents = {"b": "a-10", "c": "b-5", "d": "c-6"}
    assert line_of("d", parents).forks == {"c": 6, "b": 5, "a": 5}
    assert line_of("c", {"b": "a-3", "c": "b-5"}).forks == {"b": 5, "a": 3}


@given(st.lists(st.integers(0, 30), max_size=6), st.integers(0, 6), st.integers(0, 40))
def test_belonging_is_walking_up_by_hand(forks, ancestor, version):
    """Lineage i + 1 went back to version forks[i] of lineage i: a version survives every fork between, or is lost."""
    parents = {f"l{index + 1}": f"l{index}-{fork}" for index, fork in enumerate(forks)}
    expected = ancestor <= len(forks) and all(version <= fork for fork in forks[ancestor:])
    assert belongs(f"l{ancestor}", version, line_of(f"l{len(forks)}", parents)) == expected


@pytest.mark.parametrize(
    ("parents", "says"),
    [({"a": "weights"}, "<lineage>-<version>"), ({"a": "a-1"}, "own ancestor"), ({"a": "b-1", "b": "c-1", "c": "b-2"}, "own ancestor")],
)
def test_a_history_of_lineages_that_makes_no_sense_is_refused(parents, says):
    with pytest.raises(ValueError, match=says):
        line_of("a", parents)
