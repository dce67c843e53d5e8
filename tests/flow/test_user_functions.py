"""Functions of the user's: what they raise and what they answer wrongly ends the run in one line that says which, for which rewards."""

from typing import Any

import numpy as np
import pytest

from headway.errors import ConfigError, EnvironmentFailed
from headway.flow.user_functions import called, checked_advantages
from headway.rules.advantages import max_rl


def test_what_it_raises_is_told_with_the_rewards_and_its_traceback_below():
    def by_zero(rewards):
        return rewards[0] / 0

    with pytest.raises(EnvironmentFailed, match=r"^rollout\.filter raised ZeroDivisionError for the rewards \[1\.0\]: ") as found:
        called("rollout.filter", by_zero, [1.0])
    assert "by_zero" in found.value.detail


def test_what_headway_itself_says_of_rewards_is_said_as_it_is():
    with pytest.raises(EnvironmentFailed, match=r'^rollout\.advantage = "max_rl": a reward is 2, and max_rl is defined for'):
        checked_advantages(max_rl, np.array([0.0, 2.0]))


@pytest.mark.parametrize("answer", [[1.0], [1.0, float("nan")], [[1.0, 2.0]], 0.0])
def test_an_answer_that_is_not_one_finite_number_for_each_reward_is_refused(answer):
    with pytest.raises(ConfigError, match=r"^rollout\.advantage: for the rewards \[0\.0, 1\.0\] it returned .*: one finite number"):
        checked_advantages(lambda _: answer, np.array([0.0, 1.0]))


def test_any_sequence_of_numbers_is_an_answer():
    answer: Any = [1, 2]
    assert checked_advantages(lambda rewards: answer, np.array([0.0, 1.0])).tolist() == [1.0, 2.0]
