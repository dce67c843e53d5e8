"""Any interleaving of events: the bound, no deadlock, no leak, and a ledger that agrees with a recount, after every one of them.

What happens is drawn twice over: by hypothesis, which makes a counterexample small, and by plain seeds, which are fast. `make fuzz` draws
more.
"""

import os
import random
from collections import Counter

import pytest
from any_history import ACTIONS, AnyHistory
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

FUZZ = bool(os.environ.get("HEADWAY_FUZZ"))
STEPS = 60
CHUNKS, SEEDS = (40, 500) if FUZZ else (10, int(os.environ.get("HEADWAY_SEEDS", "200")))
DRAWS = st.randoms(use_true_random=False)


class Histories(RuleBasedStateMachine):
    """Every action at any time; what cannot happen now does nothing."""

    @initialize(draw=DRAWS)
    def begin(self, draw):
        self.history = AnyHistory(draw)

    @rule(action=st.sampled_from(sorted(ACTIONS)), draw=DRAWS)
    def act(self, action, draw):
        if self.history.possible(action):
            getattr(self.history, action)(draw)
            self.history.check()


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=5000 if FUZZ else 60, stateful_step_count=STEPS, deadline=None, suppress_health_check=list(HealthCheck)
)

seen = Counter()


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_history_breaks_the_bound_or_is_stuck_or_leaks(chunk):
    for seed in range(chunk * SEEDS, (chunk + 1) * SEEDS):
        draw = random.Random(seed)
        history = AnyHistory(draw)
        done = []
        try:
            for _ in range(STEPS):
                done.append(history.step(draw))
        except Exception as error:
            error.add_note(f"seed {seed}: {history.limits}, after {done}")
            raise
        seen.update(history.seen)


def test_the_histories_reach_what_they_are_about():
    """A test that never drops, dissolves or evicts would show nothing of it."""
    if not seen:
        test_no_history_breaks_the_bound_or_is_stuck_or_leaks(0)
    for what in ("batches", "crashes", "surplus", "kept", "dissolved", "shipped again", "dropped for a batch", "all masked", "replayed"):
        assert seen[what], what
    assert seen["continued"]
    assert seen["died again"]
    for what in ("admitted after a crash", "quarantined", "missing"):
        assert seen[what], what
    for reason in ("alien", "newer", "over age", "no room"):
        assert seen[reason], reason
