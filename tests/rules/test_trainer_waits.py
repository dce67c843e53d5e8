"""What the progress line says that the trainer waits for is what would let the next batch be formed."""

import msgspec
import pytest

from headway.rules.admission import GateLimits
from headway.rules.batching import trainer_waits_for
from headway.rules.ledger import Ledger
from headway.rules.view import Unit

LIMITS = GateLimits(groups_per_batch=2, group_size=1, max_concurrent=100, steps_ahead=1.0, steps=10, max_staleness=1)
UNIT = Unit("p", 0, 0, 1)


def ledger(ready, running=0, **more):
    groups = range(ready + running)
    return Ledger(
        ready=dict.fromkeys(groups[:ready], UNIT),
        running=dict.fromkeys(groups[ready:], UNIT),
        births={0: ready + running} if groups else {},
        ready_births={0: ready} if ready else {},
        **more,
    )


@pytest.mark.parametrize(
    ("now", "settings", "what"),
    [
        (ledger(0, next_batch=1, trained=0), {}, "nothing"),
        (ledger(2), {}, "a batch to be written"),
        (ledger(1), {}, "rollouts (1 of 2 groups)"),
        (ledger(1, promised={0: 1}), {}, "a batch to be written"),
        (ledger(0, promised={0: 1}), {}, "rollouts (0 of 1 groups)"),
        (ledger(2, 2), {"on_stale": "wait"}, "a batch to be written"),
        (ledger(2, 3), {"on_stale": "wait"}, 'groups in flight that would grow too old (rollout.on_stale = "wait")'),
        (ledger(2, 1, ready_tokens=70), {"batch_tokens": 100}, "rollouts (70 of 100 tokens)"),
        (ledger(2, 1, ready_tokens=100), {"batch_tokens": 100}, "a batch to be written"),
    ],
)
def test_it_is_said_what_the_trainer_waits_for(now, settings, what):
    assert trainer_waits_for(now, msgspec.structs.replace(LIMITS, **settings)) == what
