"""Whole runs on virtual time, for tests: a world that is quick to say, and `check`, what holds of every run, whatever happened in it."""

from collections import Counter

from headway.events import (
    Admitted,
    BatchFormed,
    Ended,
    Finished,
    GroupDropped,
    RolloutDropped,
)
from headway.rules.ledger import Ledger, apply
from headway.settings import RolloutSection
from headway.sim.distributions import Fixed, Lognormal, Pareto, Uniform
from headway.sim.run import WorldSettings
from headway.sim.worker import Fault, RolloutSettings

B, G, STEPS = 4, 4, 20
AMPLE, SCARCE = 20 * B * G, 2 * G
LATENCIES = {"fixed": Fixed(1.0), "uniform": Uniform(0.5, 1.5), "lognormal": Lognormal(1.0, 1.0), "pareto": Pareto(1.0, 2.0)}
FAULTS = {
    "sound": (),
    "faulty": (Fault("environment_error", 0.1), Fault("worker_died", 0.02, retryable=False), Fault("engine_error", 0.03)),
}
ALWAYS_ONE = RolloutSettings(reward=1.0)


def world(latency=LATENCIES["lognormal"], faults=(), **more):
    return WorldSettings(rollouts=RolloutSettings(seconds=latency, faults=faults, reward=one_of_each), **more)


def one_of_each(prompt, member, drawn):
    return float(member % 2)  # no group scores alike


def rollout(max_staleness=2, max_concurrent=AMPLE, **more):
    section = {"groups_per_batch": B, "group_size": G, "max_staleness": max_staleness, "steps_ahead": max_staleness}
    return RolloutSection(**section | {"max_concurrent": max_concurrent} | more)


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


def check(result, section):
    """Assert what holds of every run, whatever happened in it."""
    if section.on_stale != "train":
        assert result.max_staleness <= section.max_staleness
    assert result.peak <= section.max_concurrent
    ledger = Ledger()
    endings: Counter[int] = Counter()
    members: Counter[tuple[int, int]] = Counter()
    formed: list[int] = []
    births: dict[int, int] = {}
    times = [event.time for event in result.events]
    assert times == sorted(times)
    for event in result.events:
        match event:
            case Admitted():
                assert event.birth == ledger.version
                births[event.group] = event.birth
            case GroupDropped():
                endings[event.group] += 1
            case BatchFormed():
                assert event.k - ledger.trained <= section.max_lead
                chosen = [births[group] for group in event.groups]
                left = [unit.birth for group, unit in ledger.ready.items() if group not in event.groups]
                assert chosen == sorted(chosen)
                assert not left or max(chosen) <= min(left)
                endings.update(event.groups)
                formed.append(event.k)
            case Finished():
                members[event.group, event.member] += 1
            case RolloutDropped(final=True):
                members[event.group, event.member] += 1
        apply(ledger, event)
        assert ledger.rollouts_in_flight <= section.max_concurrent
        assert 0 <= ledger.version <= ledger.trained <= ledger.next_batch or ledger.version == -1
    live = {*ledger.running, *ledger.ready}
    assert set(endings.values()) <= {1}, "a group ended twice"
    assert births.keys() == endings.keys() | live, "a group has no ending"
    assert not endings.keys() & live
    assert set(members.values()) <= {1}, "a rollout ended twice"
    assert formed == list(range(len(formed)))
    assert list(result.batches) == formed
    assert all(len(batch.groups) == section.groups_per_batch for batch in list(result.batches.values())[:-1])
    assert not ledger.running
    assert ledger == result.ledger
    assert isinstance(result.events[-1], Ended)
