"""Why the gate was closed and the trainer waited: the cohort stepper names the causes that the virtual loop names, for as long."""

from typing import Any

import pytest
from test_cohorts import scenario

from headway.sim.cohorts import step
from headway.sim.distributions import Fixed, Given, Lognormal, Uniform
from headway.sim.figures import summarise
from headway.sim.play import play

WORLDS: dict[str, tuple[Given, dict[str, Any]]] = {
    "nothing waits for a slot": (Uniform(0.2, 1.8), {"groups_per_batch": 4, "steps_ahead": 1, "sync": 0.25}),
    "all wait for slots all the time": (Fixed(1.3), {"groups_per_batch": 4, "max_concurrent": 2, "steps_ahead": 4, "sync": 0.25}),
    "some wait for slots for a while": (Lognormal(1.0, 0.7), {"max_concurrent": 20, "max_staleness": 1, "steps_ahead": 1, "sync": 0.25}),
    "groups wait for slots": (Uniform(0.2, 1.8), {"group_size": 2, "max_concurrent": 24, "steps_ahead": 1, "sync": 0.25}),
    "what is cancelled makes room": (Uniform(0.2, 1.8), {"max_concurrent": 12, "on_stale": "drop", "max_staleness": 1, "steps_ahead": 1}),
    "deadlines hold batches up": (
        Lognormal(1.0, 0.7),
        {"on_stale": "wait", "max_staleness": 2, "steps_ahead": 2, "timeout_seconds": 1000.0, "sync": 0.25},
    ),
}


@pytest.mark.parametrize("world", WORLDS)
def test_the_stepper_and_the_loop_name_the_same_causes(world):
    seconds, knobs = WORLDS[world]
    one = scenario(seconds, steps=300, **knobs)
    stepped, played = step(one), summarise(play(one))
    for name in ("gate_closed", "trainer_waits"):
        by_cohorts, by_loop = getattr(stepped, name), getattr(played, name)
        for cause in by_cohorts.keys() | by_loop.keys():
            assert by_cohorts.get(cause, 0.0) == pytest.approx(by_loop.get(cause, 0.0), abs=0.05), cause
