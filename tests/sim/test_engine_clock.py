"""What starts at the instant at which a version is served is stamped with that version, whatever clocks round to."""

import asyncio

from hypothesis import example, given
from hypothesis import strategies as st

from headway.sim.engine import EngineSettings, SimEngine
from headway.sim.loop import run as run_on_virtual_time
from headway.types import Checkpoint


@example([(0.507556144820747, 0.8269151492271697), (10.915, 0.8269151492271697)])  # a clock read too early was 1.8e-15 s ahead
@given(st.lists(st.tuples(st.floats(0.01, 30), st.floats(0.001, 1)), min_size=1, max_size=20))
def test_a_rollout_that_starts_with_a_version_is_of_that_version(syncs):
    async def play():
        engine = SimEngine("engine-0", EngineSettings())
        for version, (gap, pause) in enumerate(syncs, start=1):
            await asyncio.sleep(gap)
            checkpoint = Checkpoint(version, f"sim-{version}", "")
            await engine.prepare(checkpoint)
            await asyncio.sleep(pause)
            await engine.commit(checkpoint)
            assert engine.stamps(engine.clock(), 1.0, 10) == [(0, version)]

    run_on_virtual_time(play(), limit_seconds=1e6)
