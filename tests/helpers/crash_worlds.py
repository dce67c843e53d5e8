"""Runs that are killed and taken up again, on virtual time: any world, any mode, any moment, from a seed."""

import random
from collections import Counter
from dataclasses import dataclass, replace

from bound_world import LATENCIES, MODES, bounded, bounded_world
from lives import check_lives
from offered_groups import offered_group

from headway.settings import EvalSection, RolloutSection, RunSection
from headway.sim.distributions import Fixed
from headway.sim.engine import EngineSettings
from headway.sim.run import SimResult, WorldSettings, simulate
from headway.sim.worker import Fault
from headway.sim.world import Kill

FAULTS = (Fault("environment_error", 0.1), Fault("engine_error", 0.05), Fault("bad_reward", 0.05, retryable=False))
WITHOUT_END = 100_000


def limits(steps=WITHOUT_END, **more):
    """[run] without the guards that would end a run with a heavy tail."""
    guards = {"max_uncovered_batches": 0, "max_empty_batches": 10_000, "max_consecutive_failures": 0, "drain_timeout_seconds": 1e6}
    return RunSection(steps=steps, **guards | more)


@dataclass(kw_only=True)
class Case:
    """One run, and how it is killed."""

    world: WorldSettings
    section: RolloutSection
    kills: list
    evaluation: EvalSection | None = None
    seed: int = 0
    steps: int = WITHOUT_END

    def play(self) -> SimResult:
        return simulate(
            self.world,
            self.section,
            limits(self.steps),
            evaluation=self.evaluation,
            kills=self.kills,
            interleaving=self.seed,
            limit_seconds=1e6,
        )

    @property
    def prompts(self):
        return [(f"prompt-{number}", epoch) for number in range(self.world.prompts) for epoch in range(self.world.epochs)]

    def checked(self) -> Counter:
        """Play it and hold it to all promises; return what became of what was live at the kills."""
        result = self.play()
        books = check_lives(result, self.section, self.steps, prompts=self.prompts if self.steps == WITHOUT_END else ())
        return Counter(
            {
                "lives": result.lives,
                "batches": len(result.world.trained),
                "abandoned batches": len(result.world.abandoned),
                "continued groups": books.continued,
                "interrupted groups": result.ledger.dropped.get("interrupted", 0),
                **{f"evicted: {cause}": count for cause, count in books.evicted.items()},
            }
        )


def replayed_files(n):
    """A replay source of n groups, which goes on behind those that are durable."""

    async def files(durable):
        for number in range(n):
            if not durable.get(name := f"file {number}"):
                yield offered_group(name, "replay")

    return files


def _section(draw):
    mode, bound, group_size = draw.choice([*MODES]), draw.choice([0, 1, 2, 4]), draw.choice([1, 2, 4])
    at_ship = MODES[mode][0] == "ship"
    return bounded(
        mode,
        bound,
        groups_per_batch=draw.choice([1, 2, 4]),
        group_size=group_size,
        max_concurrent=(16 if at_ship else draw.choice([4, 250])) * group_size,
        steps_ahead=draw.choice([bound, bound, bound / 2, min(1, bound)]),
        max_lead=draw.choice([0, 1, 1, 2]),
        incomplete=draw.choice(["partial", "drop"]) if group_size > 1 else "drop",
        max_prompt_failures=draw.choice([1, 3]),
        max_held_bytes=draw.choice([1, 2**30]),
        replayed_groups=draw.choice([0, 0, 0, 1]),
    )


def _world(draw, seed):
    scored = draw.random() < 0.3
    return bounded_world(
        LATENCIES[draw.choice([*LATENCIES])],
        prompts=draw.choice([30, 80]),
        epochs=draw.choice([1, 1, 2]),
        seed=seed,
        commit_seconds=draw.choice([0, 0.01, 0.3]),
        write_seconds=draw.choice([0, 0.05]),
        faults=draw.choice([(), FAULTS]),
        engines=[EngineSettings(commit_seconds=0.02, transfer_seconds=0.1)] * draw.choice([1, 2]),
        rollouts={"scored_apart": scored, "score_seconds": Fixed(draw.choice([0, 0.5])), "payload": draw.random() < 0.2},
        eval_prompts=4,
    )


def _kills(draw, seconds):
    kills, at = [], 0.0
    for _ in range(draw.randint(1, 5)):
        losses = {
            "trainer_dies": draw.random() < 0.5,
            "engines_die": draw.random() < 0.5,
            "weights_lost": draw.choice([0, 0, 0, 1, 3]),
            "down_seconds": draw.choice([0, 0.5, 5]),
        }
        if draw.random() < 0.5:
            kills.append(Kill(commit=draw.randint(1, 60), kept=draw.choice([0, None, 1, 2, 5]), **losses))
        else:
            at += draw.expovariate(3 / seconds)
            kills.append(Kill(at=at, **losses))
    return kills


def any_case(seed) -> Case:
    """Return a case; the same for a seed everywhere."""
    draw = random.Random(seed)
    section, world = _section(draw), _world(draw, seed)
    if section.replayed_groups:
        world = replace(world, replayed=replayed_files(20))
    evaluation = EvalSection(prompts="sim", every=draw.choice([2, 5]), n=2) if draw.random() < 0.3 else None
    seconds = world.prompts * world.epochs / section.groups_per_batch
    return Case(world=world, section=section, kills=_kills(draw, seconds), evaluation=evaluation, seed=seed)
