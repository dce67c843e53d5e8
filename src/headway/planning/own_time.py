"""How much of what rollouts wait for is each one's own, and how much the members of a group meet together.

A simulation draws for each rollout by itself. Had it to draw what a whole group met together (a machine's bad second, a queue), its
groups would wait for the worst of many bad seconds, each for another one. So only what differs within groups is left to be drawn.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.sim.distributions import Floats


def own_time(environment: Floats, groups: NDArray[np.int64]) -> Floats:
    """Return `environment`, float64 (rollouts), drawn together about its mean; `groups`: whose member each is.

    By how much: the mean distance of two members of a group, to that of any two rollouts. Groups of one tell nothing of it: they get back
    what was measured.
    """
    rng = np.random.default_rng(0)
    shuffled = rng.permutation(len(environment))
    in_groups = shuffled[np.argsort(groups[shuffled], kind="stable")]
    fellows = np.diff(groups[in_groups]) == 0
    anywhere = np.abs(np.diff(environment[shuffled]))
    if not fellows.any() or not anywhere.any():
        return environment
    share = float(np.abs(np.diff(environment[in_groups]))[fellows].mean() / anywhere.mean())
    mean = environment.mean()
    return np.asarray(mean + min(1.0, share) * (environment - mean))
