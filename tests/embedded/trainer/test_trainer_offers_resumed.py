"""The first delta of a trainer that was started again: from the version that engines have, where they are not given each one."""

from typing import Any

import pytest

from headway.formats.hold import Hold
from headway.formats.run_directory import numbered

pytest.importorskip("torch")
from offering_runs import ROUNDED, assert_delta_leads_to, offers, play

pytestmark = pytest.mark.torch

EVERY_FOURTH: dict[str, Any] = {"publish_every": 4, "keep_checkpoints": 12, **ROUNDED}


@pytest.fixture
def trained(run, write_batch):
    """A run whose trainer has died at version 6: engines were given 4."""
    for k in range(12):
        write_batch(k)
    play(run, "delta", steps=6, **EVERY_FOURTH)
    assert numbered(run.weights) == list(range(7))
    return run


def test_it_leads_from_the_version_that_engines_hold(trained):
    served = Hold(trained.weight(4))
    play(trained, "delta", steps=12, **EVERY_FOURTH)
    served.release()
    assert [offers(trained, version)["delta"].base for version in (8, 12)] == [4, 8]
    assert_delta_leads_to(trained, 8)


def test_of_those_it_is_the_newest_as_an_engine_lags_behind(trained):
    holds = [Hold(trained.weight(version)) for version in (0, 4)]
    play(trained, "delta", steps=8, **EVERY_FOURTH)
    for held in holds:
        held.release()
    assert offers(trained, 8)["delta"].base == 4


def test_where_nobody_holds_one_the_whole_run_was_taken_up_and_engines_are_given_the_newest(trained):
    play(trained, "delta", steps=8, **EVERY_FOURTH)
    assert offers(trained, 8)["delta"].base == 6
    assert_delta_leads_to(trained, 8)


def test_a_version_that_engines_are_given_as_they_run_is_the_base_whatever_they_hold_yet(run, write_batch):
    for k in range(12):
        write_batch(k)
    play(run, "delta", steps=8, **EVERY_FOURTH)
    behind = Hold(run.weight(4))
    play(run, "delta", steps=12, **EVERY_FOURTH)
    behind.release()
    assert offers(run, 12)["delta"].base == 8
