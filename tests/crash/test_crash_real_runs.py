"""Part of the kill matrix that `make crash` plays: real runs killed with -9 at points that a seed draws, resumed, held to account."""

import pytest
from real_crashes import VICTIMS, Embedded, Target, die_at_commits, torment

pytestmark = pytest.mark.e2e


def test_a_run_between_fakes_survives_the_death_of_anyone_at_any_moment(tmp_path):
    with Target(tmp_path / "run", prompts=24, mode="mask", engines=2, holds=9, **{"environment.workers": 1}) as target:
        told = torment(target, 7, 6, victims=(*VICTIMS, "worker"))
    assert told.kills.total() == 6, told.lines
    assert told.became["batches trained"] >= 12
    assert told.became["prompts trained"] == 24


@pytest.mark.parametrize("mode", ["wait", "drop"])
def test_a_run_survives_its_end_before_and_after_each_of_its_first_commits(tmp_path, mode):
    with Target(tmp_path / "run", prompts=24, mode=mode) as target:
        told = die_at_commits(target, range(1, 4) if mode == "drop" else (5, 8))
    assert told.kills["orchestrator"] >= 3
    assert told.became["prompts trained"] + told.became["prompts given up"] == 24


def test_saves_that_are_killed_in_the_middle_are_none_and_leave_no_litter(tmp_path):
    with Target(tmp_path / "run", prompts=36, holds=15) as target:
        told = torment(target, 3, 5, victims=("orchestrator", "trainer"), moments=("save",))
    assert told.kills.total() == 5, told.lines
    assert told.became["prompts trained"] == 36


@pytest.mark.torch
def test_a_run_with_an_engine_and_a_trainer_of_its_own_survives_the_death_of_anyone(tmp_path):
    pytest.importorskip("torch")
    with Embedded(tmp_path / "run", prompts=48, holds=20) as target:
        told = torment(target, 5, 3, victims=("orchestrator", "engine", "trainer"), moments=("instant",))
    assert told.kills.total() == 3, told.lines
    assert told.became["prompts trained"] == 48
