"""Thousands of batches with everything going wrong all the time: memory and tasks stay as they are, and the books close at the end.

A part of it here; `make soak` plays all 20,000 batches (HEADWAY_SOAK), and a run of real processes beside.
"""

import logging
import os
import random
from typing import Any

import pytest
from bound_world import bounded, bounded_world
from crash_worlds import limits
from lives import LifeBooks
from soaking import DiskJournal, slope

from headway.events import Ended
from headway.settings import EvalSection
from headway.sim.distributions import Fixed, Lognormal, mixture
from headway.sim.engine import EngineSettings
from headway.sim.run import simulate
from headway.sim.trainer import TrainerSettings
from headway.sim.worker import Fault
from headway.sim.world import Kill

BATCHES = int(os.environ.get("HEADWAY_SOAK", "1500"))
SAMPLES = 30
MB_A_THOUSAND = 1.0 if BATCHES >= 20_000 else 3.0  # a short run is hardly past its warm-up: histories of a thousand batches fill
FAULTS = (Fault("environment_error", 0.05), Fault("engine_error", 0.02), Fault("bad_reward", 0.01, retryable=False))


def kills(draw, seconds, lost):
    """Ten ends of the process, with all that may be lost with it; none while an engine is `lost`: a run does not start then."""
    at = sorted(draw.uniform(0.02, 0.98) * seconds for _ in range(10))
    at = sorted(instant if abs(instant - lost) > 60 else instant + 130 for instant in at)
    losses: list[dict[str, Any]] = [
        {},
        {"trainer_dies": True},
        {"engines_die": True, "trainer_dies": True},
        {"weights_lost": 2},
        {"down_seconds": 30.0},
    ]
    return [Kill(at=instant, **losses[number % len(losses)]) for number, instant in enumerate(at)]


@pytest.mark.parametrize("mode", ["mask"] if BATCHES < 20_000 else ["mask", "drop"])
def test_O02_a_long_run_with_faults_keeps_its_memory_flat_and_its_books_closed(mode, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL, "headway")  # pytest keeps all that is logged
    draw = random.Random(mode)
    stalls = {k: draw.choice([5.0, 60.0]) for k in range(0, BATCHES, 97)}
    lost = BATCHES * 0.5
    world = bounded_world(
        mixture((0.98, Lognormal(1.0, 0.5)), (0.02, Fixed(200.0))),  # one in fifty never comes back in time
        faults=FAULTS,
        trainer=TrainerSettings(seconds=Lognormal(1.0, 0.3), late=stalls),
        engines=[EngineSettings(commit_seconds=0.02), EngineSettings(commit_seconds=0.05, dies_at=lost, back_at=lost + 20)],
        prompts=500,
        commit_seconds=0.01,
        write_seconds=0.02,
        keep_batches=64,
        eval_prompts=4,
    )
    section = bounded(mode, 4, groups_per_batch=2, group_size=2, max_concurrent=64, steps_ahead=2, timeout_seconds=30.0, max_held_bytes=1)
    journal = DiskJournal(tmp_path / "journal", every=max(1, BATCHES // SAMPLES))
    result = simulate(
        world,
        section,
        limits(BATCHES),
        evaluation=EvalSection(prompts="sim", every=50),
        kills=kills(draw, BATCHES, lost),
        journal=journal,
    )
    assert result.reason == f"all {BATCHES} steps are trained"
    assert result.lives == 11

    settled = [sample for sample in journal.samples if sample[0] > BATCHES * 0.2]
    a_thousand = {name: 1000 * slope([(sample[0], sample[at]) for sample in settled]) for at, name in ((1, "MB"), (2, "objects"))}
    print(f"{mode}: {journal.samples[0]} ... {journal.samples[-1]}; slopes per 1000 batches {a_thousand}")  # noqa: T201  the figures
    assert a_thousand["MB"] < MB_A_THOUSAND
    tasks = [sample[3] for sample in settled]
    assert max(tasks) <= 2 * section.max_concurrent + 40

    books, last, events = LifeBooks(section, BATCHES), None, 0
    for event in journal.replay():
        books.read(event)
        last, events = event, events + 1
    journal.shut()
    assert isinstance(last, Ended)
    assert books.resumes == 10
    assert (books.running, books.in_flight, books.trained) == (set(), 0, BATCHES)
    assert len(books.births) == len(books.shipped) + len(books.dropped) + len(books.ready)
    assert len(books.births) * section.group_size == books.members.total() + books.cut_short
    assert {"timeout", "environment_error", "engine_error", "bad_reward"} <= result.ledger.lost.keys()
    print(f"{mode}: {events} events, {books.continued} groups continued, {dict(result.ledger.dropped)}, evicted {dict(books.evicted)}")  # noqa: T201
