"""`steps_ahead = "auto"`: slow, recorded, by what was measured, and never above max_staleness."""

import pytest
from doubles import Spine, beside, turns

from headway.events import Admitted, BatchAcknowledged, BatchFormed, PaceChanged, Ready
from headway.flow.pacer import Pacer
from headway.rules.admission import GateLimits, steps_ahead
from headway.rules.pacing import BATCHES_BETWEEN_CHANGES


def history(spine, batches, *, latency, cycle):
    """Let batches of one group be trained, each group `latency` seconds after its admission, each batch `cycle` seconds after the last."""
    for _ in range(batches):
        k = spine.ledger.next_batch
        now = 1000.0 + cycle * k
        spine.record(Admitted(now - latency, k, f"p{k}", 0, 1, max(0, spine.ledger.version)))
        spine.record(Ready(now, k, zero_advantage=False))
        spine.record(BatchFormed(now, k, (k,), 0.0))
        spine.record(BatchAcknowledged(now, k))


@pytest.mark.parametrize(("latency", "cycle", "bound", "ends_at"), [(30.0, 10.0, 8, 4.0), (30.0, 10.0, 3, 3.0), (1.0, 10.0, 8, 1.5)])
async def test_the_pace_moves_by_halves_to_what_is_needed_and_stays(latency, cycle, bound, ends_at):
    spine = Spine()
    limits = GateLimits(groups_per_batch=1, group_size=1, max_concurrent=9, steps_ahead=2.0, steps=1000, max_staleness=bound)
    pacer = Pacer(limits, watch=spine.watch, record=spine.record, clock=spine.clock)
    async with beside(pacer.run(), spine.recorder.run()):
        await turns()
        for _ in range(20):
            before = steps_ahead(spine.ledger, limits)
            history(spine, BATCHES_BETWEEN_CHANGES - 1, latency=latency, cycle=cycle)
            await turns()
            assert steps_ahead(spine.ledger, limits) == before
            history(spine, 1, latency=latency, cycle=cycle)
            await turns()
            assert abs(steps_ahead(spine.ledger, limits) - before) in {0.0, 0.5}
    changes = [event.steps_ahead for event in spine.of(PaceChanged)]
    assert changes == sorted(changes, reverse=ends_at < 2)
    assert steps_ahead(spine.ledger, limits) == changes[-1] == ends_at
    assert len(changes) == abs(ends_at - 2.0) / 0.5
