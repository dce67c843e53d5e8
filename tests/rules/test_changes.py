"""A rollout that ends changes nothing that anybody waits for but slots, whatever happened before: so nobody else need be asked again."""

import random
from collections import Counter

from any_history import AnyHistory

from headway.events import Admitted, Finished, Ready, RolloutDropped
from headway.rules.admission import capacity_by_staleness, capacity_reason, free_slots
from headway.rules.batching import can_form, groups_to_take, may_form, nothing_left
from headway.rules.changes import frees_slots_only
from headway.rules.pacing import change_due
from headway.rules.replay import place, reserved
from headway.rules.scheduling import eval_due, run_is_complete, sync_must_wait
from headway.settings import EvalSection, FinishWhen

EVALS = EvalSection(every=2, prompts="held_out.jsonl")
GOOD = FinishWhen(reward_above=0.5, over_batches=2)


def waited_for(ledger, limits):
    """What the conditions of the components read, but for slots."""
    facts = (ledger.version, ledger.trained, ledger.next_batch, ledger.draining, ledger.exhausted, ledger.barren, ledger.eval_running)
    sets = (list(ledger.running), list(ledger.ready), list(ledger.ingested), ledger.waiting_prompts)
    admission = (capacity_by_staleness(ledger, limits), place(ledger, limits), reserved(ledger, limits, 3))
    forming = (can_form(ledger, limits), groups_to_take(ledger, limits), may_form(ledger, limits.max_lead), nothing_left(ledger))
    ends = (run_is_complete(ledger, 4, GOOD), eval_due(ledger, EVALS), sync_must_wait(ledger, EVALS), change_due(ledger.trained, 0))
    return facts, sets, admission, forming, ends


class Watched(AnyHistory):
    """Looks at what is waited for before and after each event that is said to change none of it."""

    def record(self, *events):
        for event in events:
            before, slots = waited_for(self.ledger, self.limits), free_slots(self.ledger, self.limits, 0)
            reason = capacity_reason(self.ledger, self.limits)
            super().record(event)
            if frees_slots_only(event):
                assert waited_for(self.ledger, self.limits) == before, event
                self.seen["freed"] += free_slots(self.ledger, self.limits, 0) > slots
                self.seen["opened the gate"] += (reason, capacity_reason(self.ledger, self.limits)) == ("concurrency", "open")


def test_whatever_happened_before_a_rollout_that_ends_changes_slots_and_nothing_else_that_is_waited_for():
    seen = Counter()
    for seed in range(60):
        draw = random.Random(seed)
        history = Watched(draw)
        for _ in range(60):
            history.step(draw)
        seen.update(history.seen)
    assert min(seen["freed"], seen["opened the gate"]) > 0, seen


def test_it_is_the_ends_of_rollouts_that_are_meant():
    assert frees_slots_only(Finished(0.0, 0, 0, 0, 1.0, 5, 4, 0, 0))
    assert frees_slots_only(RolloutDropped(0.0, 0, 0, 0, "timeout", "", 0, final=True))
    assert not frees_slots_only(Ready(0.0, 0, zero_advantage=False))
    assert not frees_slots_only(Admitted(0.0, 0, "p0", 0, 1, 0))
