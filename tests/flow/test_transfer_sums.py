"""What weights cost on their way to engines, in the pipeline's rows: sums over engines, by way, and the latest; what fails is not in it."""

import asyncio
from typing import Any

from doubles import Spine, beside, checkpoint
from weights_stage import Trainer

from headway.errors import EngineFailed
from headway.flow.fleet import Fleet
from headway.settings import EngineSection
from headway.sim.engine import EngineSettings, SimEngine
from headway.types import Transferred

NONE = {"directory": 0, "delta": 0, "memory": 0, "lora": 0}


class Measured(SimEngine):
    """An engine that says what its transfers took; None: it does not."""

    def __init__(self, name, *took):
        super().__init__(name, EngineSettings(), label="line-0")
        self.took = list(took)

    async def transfer(self, given):
        await super().transfer(given)
        took = self.took.pop(0)
        if took == "fails":
            raise EngineFailed("it does not load")
        return took


def fleet_of(*engines):
    spine = Spine(published=False)
    trainer: Any = Trainer(spine)  # as much of one as weights need
    fleet = Fleet(
        engines,
        roster=None,
        make_engine=None,
        trainer=trainer,
        watch=spine.watch,
        record=spine.record,
        clock=spine.clock,
        settings=EngineSection(),
        evaluation=None,
        steps=100,
        publish_lag=0,
        publish_every=1,
    )
    return fleet, trainer


def figures(fleet):
    row = fleet.snapshot()
    last = (row["last_transfer_bytes"], row["last_transfer_seconds"])
    return {way: n for way, n in row["transfers"].items() if n}, row["transfer_bytes"], row["transfer_seconds"], last


async def test_transfers_add_up_over_engines_and_versions_and_the_latest_is_told():
    one = Measured("e0", Transferred("delta", 10, 0.5), Transferred("directory", 1000, 4.0))
    two = Measured("e1", Transferred("delta", 10, 0.25), Transferred("lora", 7, 0.125))
    fleet, trainer = fleet_of(one, two)
    assert fleet.snapshot()["transfers"] == NONE
    assert figures(fleet) == ({}, 0, 0.0, (None, None))
    await fleet.start(checkpoint(0))  # they serve it already
    assert figures(fleet) == ({}, 0, 0.0, (None, None))
    async with beside(fleet.watcher.run()):
        trainer.publish(1)
        await asyncio.sleep(60)
        assert figures(fleet)[:3] == ({"delta": 2}, 20, 0.75)
        trainer.publish(2)
        await asyncio.sleep(60)
    by_way, size, seconds, last = figures(fleet)
    assert (by_way, size, seconds) == ({"delta": 2, "directory": 1, "lora": 1}, 1027, 4.875)
    assert last in {(1000, 4.0), (7, 0.125)}


async def test_a_transfer_that_failed_or_says_nothing_is_not_counted():
    fleet, trainer = fleet_of(Measured("e0", "fails", None, None), Measured("e1", Transferred("memory", 5, 1.0), None))
    await fleet.start(checkpoint(0))
    async with beside(fleet.watcher.run()):
        trainer.publish(1)
        await asyncio.sleep(60)
        trainer.publish(2)
        await asyncio.sleep(60)
    assert figures(fleet) == ({"memory": 1}, 5, 1.0, (5, 1.0))
