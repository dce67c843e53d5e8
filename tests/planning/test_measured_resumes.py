"""What is measured in a run that was taken up: behind versions that are gone, and by a clock that was behind."""

import msgspec
import pytest

from headway.events import Admitted, AnyEvent, BatchAcknowledged, BatchFormed, Finished, Published, Ready, Resumed
from headway.planning.observed import acknowledged, observe, trained_at

SECONDS = 3.0  # of a batch


def batches(first: int, end: int, start: float, number: int) -> list[AnyEvent]:
    """Return a history of batches of one group of one rollout: it takes 2 s, and the trainer 1 s. `number`: of the first group."""
    events: list[AnyEvent] = []
    for k in range(first, end):
        begin, group = start + SECONDS * (k - first), number + k - first
        events += [
            Admitted(begin, group, f"prompt-{group}", 0, 1, k),
            Finished(begin + 2, group, 0, 0, 1.0, 30, 20, k, k, turns=1, seconds=2.0),
            Ready(begin + 2, group, zero_advantage=False),
            BatchFormed(begin + 2, k, (group,), 0.5),
            BatchAcknowledged(begin + 3, k),
            Published(begin + 3, k + 1, ("engine-0",)),
        ]
    return events


def test_batches_that_a_run_went_back_behind_are_not_its_last():
    events = [*batches(0, 10, 0.0, 0), Resumed(100.0, 4, 4, "other"), *batches(4, 7, 100.0, 10)]
    assert sorted(trained_at(events)) == [0, 1, 2, 3, 4, 5, 6]
    assert acknowledged(events) == [3.0, 6.0, 9.0, 12.0, 103.0, 106.0, 109.0]


@pytest.mark.parametrize("clock", [40.0, 1_000.0], ids=["behind", "ahead"])
def test_a_clock_of_another_host_leaves_nothing_out(clock):
    events = [*batches(0, 20, 0.0, 0), Resumed(clock, 20, 20, "sim"), *batches(20, 40, clock, 20)]
    times = acknowledged(events)
    assert times == sorted(times)
    found = observe(events, 0.0, times[-1])
    assert [batch.k for batch in found.trained] == list(range(40))
    assert {batch.seconds for batch in found.trained} == {1.0}
    assert {rollout.end - rollout.start for rollout in found.rollouts} == {2.0}
    assert len(found.rollouts) == 40
    assert found.mean_in_flight == pytest.approx(80.0 / times[-1])


def test_a_batch_that_is_told_as_trained_before_it_was_formed_tells_nothing_of_the_trainer():
    *events, acknowledgement, _ = batches(0, 3, 100.0, 0)
    events += [msgspec.structs.replace(acknowledgement, time=40.0), Resumed(40.0, 3, 3, "sim"), *batches(3, 5, 40.0, 3)]
    assert [batch.k for batch in observe(events, 0.0, 1e9).trained] == [0, 1, 3, 4]


def test_only_what_changes_of_what_is_in_flight_is_kept():
    found = observe(batches(0, 10, 0.0, 0), 0.0, 1e9)
    assert list(found.in_flight) == [0.0, *[1.0, 0.0] * 10]
