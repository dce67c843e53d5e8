"""Fault cases of runs that are killed and taken up again, whole runs on virtual time: full ready sets, dead sources, evaluations."""

from itertools import takewhile
from typing import Any

import pytest

from headway.errors import PromptError
from headway.events import BatchFormed, EvalFinished, EvalStarted, Resumed
from headway.rules.ledger import Ledger, apply
from headway.settings import EvalSection, RolloutSection, RunSection
from headway.sim.distributions import Fixed
from headway.sim.run import WorldSettings, simulate
from headway.sim.trainer import TrainerSettings
from headway.sim.worker import RolloutSettings
from headway.sim.world import Kill

STEPS = 8
SLOW_TRAINER = TrainerSettings(seconds=Fixed(100.0))


def section(**more):
    return RolloutSection(**{"groups_per_batch": 2, "group_size": 2, "max_concurrent": 64, "max_staleness": 3, "steps_ahead": 3, **more})


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


def at_the_resume(events):
    """Return the ledger as it was when the run had just been taken up."""
    ledger = Ledger()
    for event in takewhile(lambda event: not isinstance(event, Resumed), events):
        apply(ledger, event)
    apply(ledger, of(Resumed, events)[0])
    return ledger


@pytest.mark.parametrize("order", [None, 1, 2])
@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, {"on_stale": "wait"}, {"on_stale": "drop"}, {"on_stale": "train"}, {"max_lead": 0}, {"max_lead": 2}, {"enforce": "ship"}],
)
def test_B05_a_run_taken_up_with_the_next_batch_complete_goes_on_to_its_end(settings, dies, order):
    world = WorldSettings(rollouts=RolloutSettings(seconds=Fixed(1.0)), trainer=SLOW_TRAINER)
    result = simulate(
        world,
        section(**settings),
        RunSection(steps=STEPS),
        kills=[Kill(at=250.0, trainer_dies=dies)],
        interleaving=order,
        limit_seconds=5e3,
    )
    before = at_the_resume(result.events)
    assert len(before.ready) >= 2, "the case wants the next batch complete, and the set full"
    assert before.trained == 2
    assert result.ledger.trained == STEPS >= before.trained + 3
    assert [event.k for event in of(BatchFormed, result.events)][-STEPS + before.next_batch :] == list(range(before.next_batch, STEPS))
    assert result.max_staleness <= 3 or settings.get("on_stale") == "train"


def test_B05_with_a_source_that_is_dead_the_run_ends_with_its_cause():
    world = WorldSettings(rollouts=RolloutSettings(seconds=Fixed(1.0)), trainer=SLOW_TRAINER, prompts_fail_after=75)
    with pytest.raises(PromptError, match="the prompt source failed after 75 prompts"):
        simulate(world, section(), RunSection(steps=1000), kills=[Kill(at=250.0)], limit_seconds=1e5)


def cut_short(which, trainer):
    """Kill a run in the middle of its evaluation number `which`; return that evaluation's start, and how the run went on."""
    world = WorldSettings(rollouts=RolloutSettings(seconds=Fixed(10.0)), trainer=trainer, eval_prompts=20)
    settings: dict[str, Any] = {"evaluation": EvalSection(prompts="eval.jsonl", every=2, n=1)}
    scarce = section(max_concurrent=8)
    undisturbed = simulate(world, scarce, RunSection(steps=STEPS), **settings)
    assert not any(row["repeated"] for row in undisturbed.rows["eval"])
    begun, ended = of(EvalStarted, undisturbed.events)[which], of(EvalFinished, undisturbed.events)[which]
    return begun, simulate(world, scarce, RunSection(steps=STEPS), kills=[Kill(at=(begun.time + ended.time) / 2)], **settings)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("seconds", [100.0, 10.0])
def test_J06_an_evaluation_cut_short_is_repeated_once_and_flagged_and_finished_ones_are_not_repeated(which, seconds):
    begun, result = cut_short(which, TrainerSettings(seconds=Fixed(seconds)))
    started = [event.version for event in of(EvalStarted, result.events)]
    finished = [event.version for event in of(EvalFinished, result.events)]
    (again,) = [row["version"] for row in result.rows["eval"] if row["repeated"]]
    assert started[which : which + 2] == [begun.version, again]
    if seconds > 50:
        assert again == begun.version
    else:
        assert again >= begun.version, "the trainer had gone on: the newest version there is stands in for it"
    assert finished == sorted(set(finished))
    assert len(finished) == len(started) - 1
