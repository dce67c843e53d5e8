"""A rollout runner over engines of the simulation, and attempts for it that answer by a script, or never."""

import asyncio
from typing import Any

from doubles import Spine, checkpoint, prompt

from headway.errors import EngineFailed
from headway.flow.engine_pool import EnginePool
from headway.flow.runner import RolloutRunner
from headway.sim.engine import SimEngine
from headway.types import SamplingParams


class Script:
    """An attempt that says what it is told, one answer a call (the last for ever), and keeps the requests."""

    def __init__(self, *answers, seconds=0.0):
        self.answers = list(answers)
        self.seconds = seconds
        self.requests = []

    async def __call__(self, request, move=None):
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        await asyncio.sleep(self.seconds)
        return answer


def runner(attempt, *, engines=("a", "b"), **more):
    spine = Spine()
    pool = EnginePool([SimEngine(name) for name in engines], record=spine.record, clock=spine.clock, lost_timeout_seconds=60.0)
    for name in engines:
        pool.serves(name, checkpoint(0))

    async def lost_since(place):
        return pool.lost_since(place)

    it: Any = RolloutRunner(attempt=attempt, pool=pool, lost_since=lost_since, sampling=SamplingParams(), run_seed=3, **more)
    it.pool = pool
    return it


def lose(it, name, **how):
    it.pool.lost(name, EngineFailed("it died"), **how)


def go(it, member=0, **more):
    return it.run(prompt(1), group=7, member=member, **more)


async def stuck(request, move=None):
    await asyncio.get_running_loop().create_future()
