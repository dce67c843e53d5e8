"""Stretches of time: cut, laid over each other, and added up by cause."""

import pytest

from headway.sim.intervals import DOWN, ROLLOUTS, engine_in_words, share_of, shares, trainer_in_words, within
from headway.sim.summary import Interval

GATE = [
    Interval("gate", 0, 2, "open"),
    Interval("gate", 2, 5, "closed", "staleness"),
    Interval("gate", 5, 7, "closed", "concurrency"),
    Interval("gate", 7, 20, "closed", "staleness"),
]
BY_STALENESS, BY_CONCURRENCY = (
    "no batch is full: the gate is closed by staleness",
    "no batch is full: engines are busy with max_concurrent rollouts",
)


def waiting(start, end, why):
    return Interval("trainer", start, end, "waiting", why)


def test_a_wait_for_rollouts_is_told_by_what_the_gate_said_meanwhile():
    told = list(trainer_in_words([waiting(1, 9, ROLLOUTS)], GATE))
    assert told == [
        waiting(1, 2, "no batch is full: rollouts are starting"),
        waiting(2, 5, BY_STALENESS),
        waiting(5, 7, BY_CONCURRENCY),
        waiting(7, 9, BY_STALENESS),
    ]


def test_a_wait_inside_one_stretch_of_the_gate_stays_whole():
    assert list(trainer_in_words([waiting(3, 4, ROLLOUTS), waiting(5, 7, ROLLOUTS)], GATE)) == [
        waiting(3, 4, BY_STALENESS),
        waiting(5, 7, BY_CONCURRENCY),
    ]


def test_stretches_of_the_gate_for_one_cause_are_one():
    gate = [Interval("gate", 0, 2, "closed", "staleness"), Interval("gate", 2, 5, "closed", "staleness")]
    assert list(trainer_in_words([waiting(1, 4, ROLLOUTS)], gate)) == [waiting(1, 4, BY_STALENESS)]


def test_other_waits_keep_their_place_and_get_words():
    training = Interval("trainer", 0, 3, "training")
    told = list(trainer_in_words([training, waiting(3, 4, "a batch to be written"), waiting(4, 5, DOWN), waiting(5, 6, "stalled")], GATE))
    assert told == [training, waiting(3, 4, "a batch is being written"), waiting(4, 5, DOWN), waiting(5, 6, "it has stalled (a fault)")]


def test_a_reason_that_has_no_words_is_told_as_it_is():
    gate = [Interval("gate", 0, 9, "closed", "disk")]
    assert [each.why for each in trainer_in_words([waiting(0, 9, ROLLOUTS), waiting(9, 10, "a moth")], gate)] == [
        "no batch is full: disk",
        "a moth",
    ]


def test_an_engine_is_told_in_words_unless_it_generates():
    engine = [
        Interval("engine-0", 0, 1, "generating"),
        Interval("engine-0", 1, 2, "idle", "environments"),
        Interval("engine-0", 2, 3, "paused", "weight sync"),
        Interval("engine-0", 3, 4, "lost"),
    ]
    assert [each.why for each in engine_in_words(engine)] == [
        "",
        "its rollouts are with their environments",
        "weight sync",
        "it is lost (a fault)",
    ]


def test_a_window_cuts_what_reaches_over_its_ends_and_leaves_out_the_rest():
    assert list(within(GATE, 3, 6)) == [Interval("gate", 3, 5, "closed", "staleness"), Interval("gate", 5, 6, "closed", "concurrency")]
    assert list(within(GATE, 2, 7)) == GATE[1:3]


def test_shares_are_by_cause_the_largest_first_and_add_up():
    told = shares(GATE, 20, but="open")
    assert list(told) == ["staleness", "concurrency"]
    assert told == pytest.approx({"staleness": 16 / 20, "concurrency": 2 / 20})
    assert share_of("open", GATE, 20) + sum(told.values()) == pytest.approx(1)
