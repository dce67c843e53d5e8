"""Rows: one per interval and a last one on the way out; one per batch once it is trained."""

import asyncio

import pytest
from doubles import Spine, beside, filled, turns

from headway.errors import HeadNeverTrained
from headway.events import Finished
from headway.flow.engine_counts import TIMEOUT_SECONDS, EngineCounts
from headway.flow.metrics_loop import MetricsLoop
from headway.rules.admission import GateLimits
from headway.sim.engine import SimEngine


class Stage:
    def __init__(self, rows=None, *, interval=1.0, **more):
        self.spine = Spine()
        self.out = []
        self.loop = MetricsLoop(
            rows=rows,
            watch=self.spine.watch,
            trainer_metrics=self.trainer_metrics,
            snapshots=lambda: {"capacity": 7},
            export=lambda stream, row: self.out.append((stream, row)),
            limits=GateLimits(groups_per_batch=2, group_size=1, max_concurrent=8, steps_ahead=1.0, steps=10),
            steps=10,
            interval_seconds=interval,
            clock=lambda: 1000.0 + self.spine.clock(),
            **more,
        )

    async def trainer_metrics(self, k):
        return {"batch": k + 7, "loss": k / 2}


async def test_a_row_per_interval_and_a_last_one_on_the_way_out():
    stage = Stage(interval=2.0)
    async with beside(stage.loop.run()):
        await asyncio.sleep(7)
    assert [(stream, row["time"]) for stream, row in stage.out] == [("pipeline", 1000.0 + at) for at in (2, 4, 6, 7)]


async def test_figures_are_those_of_the_interval_and_of_the_ledger():
    stage = Stage(interval=2.0)
    async with beside(stage.loop.run()):
        await turns()
        admission = stage.spine.admit(0)
        stage.spine.record(Finished(0.0, 0, 0, 0, 1.0, 30, 10, 0, 0))
        await asyncio.sleep(2)
        stage.spine.ready_group(1)
        await asyncio.sleep(2)
        await turns()
    first, second = (row for _, row in stage.out[:2])
    assert admission.group == 0
    assert (first["tokens_per_second"], second["tokens_per_second"]) == (5.0, 0.0)
    assert (first["groups_admitted"], second["groups_admitted"]) == (1, 1)
    assert (second["groups_running"], second["groups_ready"], second["rollouts_in_flight"]) == (1, 1, 1)
    assert (second["capacity"], second["trainer_waits_for"], second["version"]) == (7, "rollouts (1 of 2 groups)", 0)
    assert (first["reward_mean"], first["loop_lag_seconds"]) == (None, 0.0)


async def test_a_batch_has_its_row_once_it_is_trained_with_what_the_trainer_measured():
    stage = Stage(await filled((0, {"batch": 0}), (1, {"batch": 1, "loss": 9.0})))
    stage.spine.form()
    stage.spine.form()
    running = asyncio.ensure_future(stage.loop.run_rows())
    await turns()
    assert stage.out == []
    stage.spine.acknowledge(0)
    await turns()
    assert stage.out == [("metrics", {"batch": 0, "loss": 0.0})]
    stage.spine.acknowledge(1)
    await running
    assert stage.out[1:] == [("metrics", {"batch": 1, "loss": 9.0, "trainer/loss": 0.5})], "a trainer moves no figure of ours"


async def test_what_engines_have_sampled_is_asked_at_the_time_of_the_row():
    stage = Stage(interval=2.0, sampled_tokens=slow_count)
    async with beside(stage.loop.run()):
        await asyncio.sleep(3)
    assert [(row["time"], row["engine_sampled_tokens"]) for _, row in stage.out] == [(1002.0, 77), (1003.0, 77)]


async def slow_count():
    await asyncio.sleep(0.5)
    return 77


async def test_a_row_is_heeded_once_it_is_written_and_what_that_raises_travels():
    def heed(row):
        assert stage.out[-1][1]["batch"] == row["batch"]
        if row["batch"] == 1:
            raise HeadNeverTrained("as scripted")

    stage = Stage(await filled((0, {"batch": 0}), (1, {"batch": 1})), heed=heed)
    for k in range(2):
        stage.spine.form()
        stage.spine.acknowledge(k)
    with pytest.raises(HeadNeverTrained):
        await stage.loop.run_rows()
    assert len(stage.out) == 2


async def test_an_engine_that_hangs_holds_the_last_row_up_for_a_moment_only():
    class Hanging(SimEngine):
        async def sampled_tokens(self):
            await asyncio.sleep(1e6)

    stage = Stage(interval=100.0, sampled_tokens=EngineCounts([Hanging("e")]).total)
    async with beside(stage.loop.run()):
        await asyncio.sleep(1)
    assert [(row["time"], row["engine_sampled_tokens"]) for _, row in stage.out] == [(1001.0, None)]
    assert stage.spine.clock() == 1 + TIMEOUT_SECONDS


async def test_K08_a_run_that_is_stopped_leaves_the_rows_of_all_batches_that_were_shipped():
    stage = Stage(await filled((0, {"batch": 0}), (1, {"batch": 1}), (2, {"batch": 2})))
    for _ in range(3):
        stage.spine.form()
    async with beside(stage.loop.run_rows()):
        await turns()
        stage.spine.acknowledge(0)
        await turns()
    assert stage.out == [("metrics", {"batch": 0, "loss": 0.0}), ("metrics", {"batch": 1}), ("metrics", {"batch": 2})]


async def test_O06_the_lag_of_the_loop_is_told_as_it_was_measured_since_the_row_before():
    lags = iter([(0.1, 0.4), (0.0, 0.2)])
    stage = Stage(interval=2.0, loop_lag=lambda: next(lags))
    async with beside(stage.loop.run()):
        await asyncio.sleep(3)
    assert [(row["loop_lag_p99_seconds"], row["loop_lag_max_seconds"]) for _, row in stage.out] == [(0.1, 0.4), (0.0, 0.2)]
