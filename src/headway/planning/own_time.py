"""How much of what rollouts wait for is each one's own, and how much the members of a group meet together.

A simulation draws for each rollout by itself. Had it to draw what a whole group met together (a machine's bad second, a queue), its
groups would wait for the worst of many bad seconds, each for another one. So only what differs within groups is left to be drawn.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.sim.distributions import Floats


def own_time(environment: Floats, groups: NDArray[np.int64]) -> Floats:
    """Return what of `environment`, float64 (rollouts), is drawn for each: its distance from its group's mean, about the mean of all.

    `groups`: whose member each is. Distances are stretched by sqrt(n / (n - 1)): a member is part of its group's mean. Nothing is below 0.
    Members without a fellow tell nothing of it; where all are so, they get back what was measured.
    """
    if not len(environment):
        return environment
    _, which, members = np.unique(groups, return_inverse=True, return_counts=True)
    fellows = members[which]
    if not (fellows > 1).any():
        return environment
    of_group = (np.bincount(which, environment) / members)[which]
    apart = (environment - of_group) * np.sqrt(fellows / np.maximum(fellows - 1, 1))
    own: Floats = np.maximum(environment.mean() + apart[fellows > 1], 0.0)
    return own
