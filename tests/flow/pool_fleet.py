"""Engines of the simulation in a real pool: all serve from the start, and are lost when the test says so."""

from doubles import Spine, checkpoint

from headway.errors import EngineFailed
from headway.flow.engine_pool import EnginePool
from headway.sim.engine import SimEngine


class Fleet:
    def __init__(self, count=3, *, lost_timeout_seconds=60.0, serving=True, **more):
        self.spine = Spine()
        self.engines = [SimEngine(f"e{n}") for n in range(count)]
        limits = {"lost_timeout_seconds": lost_timeout_seconds, **more}
        self.pool = EnginePool(self.engines, record=self.spine.record, clock=self.spine.clock, **limits)
        for engine in self.engines if serving else ():
            self.pool.serves(engine.name, checkpoint(0))

    def lose(self, name, why="it died", **how):
        self.pool.lost(name, EngineFailed(why), **how)


async def taken(pool, count):
    return [(await pool.acquire()).name for _ in range(count)]
