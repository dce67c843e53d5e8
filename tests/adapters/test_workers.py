"""Rollout workers as real processes: concurrency, death, cancellation, and their parent's end."""

import asyncio
import logging
import os
import sys
import textwrap
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from ended_processes import has_ended
from scripted_engine import Hold, ScriptedEngine, Tokens
from small_models import write_tokenizer

from headway.adapters.workers.processes import ProcessWorkers
from headway.errors import ConfigError, WorkerFailed
from headway.settings import EnvironmentSection
from headway.testing.chaos.machine import children
from headway.types import AttemptRequest, Failure, Prompt, Rollout, SamplingParams, ScoreRequest

pytestmark = pytest.mark.e2e

ENVIRONMENT = """
    import asyncio, os, signal, time
    from pathlib import Path
    from headway import Outcome

    async def attempt(prompt, policy):
        fields = prompt.fields
        if "started" in fields:
            Path(fields["started"]).touch()
        match fields.get("do"):
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "block":
                time.sleep(fields["seconds"])
            case "wait":
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0.01)
                    Path(fields["cleaned"]).touch()
            case "hang in cleaning":
                while True:
                    try:
                        await asyncio.Event().wait()
                    except asyncio.CancelledError:
                        pass
        talk = await policy.open([5])
        await talk.generate()
        return Outcome(float(os.getpid()))

    async def score(prompt, rollouts):
        return [index + 0.5 for index, _ in enumerate(rollouts)]
"""


@asynccontextmanager
async def workers(tmp_path: Path, *, count: int = 1, code: str = ENVIRONMENT, **options):
    (tmp_path / "process_environment.py").write_text(textwrap.dedent(code))
    write_tokenizer(tmp_path / "model")
    cleanup = options.pop("cleanup_seconds", 5.0)
    section = EnvironmentSection(
        entry="process_environment:attempt", score="process_environment:score", workers=count, cleanup_seconds=cleanup
    )
    pool = await ProcessWorkers.start(section, base=tmp_path, model=tmp_path / "model", lineage="abc", logs=tmp_path / "logs", **options)
    try:
        yield pool
    finally:
        await pool.close()


def ask(engine: ScriptedEngine, member: int = 0, **fields) -> AttemptRequest:
    return AttemptRequest(0, member, 0, Prompt("p", 0, fields), "train", engine.url, 17, SamplingParams(max_tokens=4), 0)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another process does."""
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 -- the other process signals nothing
            await asyncio.sleep(0.01)


async def appears(path: Path) -> None:
    await until(path.exists)


def workers_left() -> list[int]:
    """Children of this process that are rollout workers: other tests of this process may have children of other kinds."""
    return children(os.getpid(), "worker")


async def test_attempts_spread_over_processes_and_run_at_once(tmp_path):
    release = asyncio.Event()
    async with ScriptedEngine(Hold(release, Tokens([1])), label="abc-1") as engine, workers(tmp_path, count=2) as pool:
        tasks = [asyncio.create_task(pool.attempt(ask(engine, member))) for member in range(300)]
        await engine.until(lambda: engine.running == 300)
        release.set()
        rollouts = [await task for task in tasks]
        assert all(isinstance(rollout, Rollout) for rollout in rollouts)
        by_process = [rollout.reward for rollout in rollouts]
        assert sorted(by_process.count(process) for process in set(by_process)) == [150, 150]
        assert [rollout.member for rollout in rollouts] == list(range(300))
        scores = await pool.score(ScoreRequest(0, Prompt("p", 0, {}), tuple(rollouts[:2])))
        assert [score.reward for score in scores] == [0.5, 1.5]


async def test_a_killed_worker_loses_its_rollouts_retryably_is_replaced_and_both_is_told(tmp_path, caplog):
    caplog.set_level(logging.INFO, "headway")
    async with ScriptedEngine(Tokens([1]), label="abc-1") as engine, workers(tmp_path) as pool:
        waiting = asyncio.create_task(pool.attempt(ask(engine, do="wait", started=str(tmp_path / "s"), cleaned=str(tmp_path / "c"))))
        await appears(tmp_path / "s")
        failures = [await pool.attempt(ask(engine, do="die")), await waiting]
        for failure in failures:
            assert isinstance(failure, Failure)
            assert (failure.cause, failure.retryable) == ("worker_died", True)
            assert "worker-0" in failure.detail
            assert "SIGKILL" in failure.detail
        assert isinstance(await pool.attempt(ask(engine)), Rollout)
    died, again = [record.getMessage() for record in caplog.records if record.name == "headway.workers"]
    assert "was ended by SIGKILL" in died
    assert again == "worker-0 is up again"


async def test_a_worker_that_dies_again_and_again_is_given_up(tmp_path):
    async with ScriptedEngine(Tokens([1]), label="abc-1") as engine, workers(tmp_path, max_restarts=1) as pool:
        assert (await pool.attempt(ask(engine, do="die"))).cause == "worker_died"
        assert isinstance(await pool.attempt(ask(engine)), Rollout)  # an answer in between: the count starts anew
        for _ in range(2):
            assert (await pool.attempt(ask(engine, do="die"))).cause == "worker_died"
        with pytest.raises(WorkerFailed, match="no rollout worker is left"):
            await pool.attempt(ask(engine))


async def test_H06_user_code_that_blocks_delays_its_neighbours_and_kills_nobody(tmp_path):
    async with ScriptedEngine(Tokens([1]), label="abc-1") as engine, workers(tmp_path) as pool:
        blocking = asyncio.create_task(pool.attempt(ask(engine, do="block", seconds=1.5)))
        neighbour = asyncio.create_task(pool.attempt(ask(engine)))
        first, second = await blocking, await neighbour
    assert isinstance(first, Rollout)
    assert isinstance(second, Rollout)
    assert first.reward == second.reward  # the same process


async def test_D07_cancelling_reaches_user_code_and_ends_when_it_has_cleaned_up(tmp_path):
    async with ScriptedEngine(Tokens([1]), label="abc-1") as engine, workers(tmp_path) as pool:
        task = asyncio.create_task(pool.attempt(ask(engine, do="wait", started=str(tmp_path / "s"), cleaned=str(tmp_path / "c"))))
        await appears(tmp_path / "s")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (tmp_path / "c").exists()
        assert isinstance(await pool.attempt(ask(engine)), Rollout)


async def test_closing_lets_user_code_clean_up_and_answers_every_call(tmp_path):
    async with ScriptedEngine(Tokens([1]), label="abc-1") as engine, workers(tmp_path, count=2) as pool:
        tasks = []
        for index in range(4):
            names: dict[str, Any] = {"started": str(tmp_path / f"s{index}"), "cleaned": str(tmp_path / f"c{index}")}
            tasks.append(asyncio.create_task(pool.attempt(ask(engine, do="wait", **names))))
            await appears(tmp_path / f"s{index}")
        await pool.close()
        assert [(await task).cause for task in tasks] == ["cancelled"] * 4
    assert all((tmp_path / f"c{index}").exists() for index in range(4))
    assert not workers_left()


async def test_user_code_that_never_stops_cleaning_is_ended_at_the_limit(tmp_path):
    async with ScriptedEngine(Tokens([1]), label="abc-1") as engine, workers(tmp_path, cleanup_seconds=0.1) as pool:
        task = asyncio.create_task(pool.attempt(ask(engine, do="hang in cleaning", started=str(tmp_path / "s"))))
        await appears(tmp_path / "s")
        await pool.close()  # the user's code would go on for ever
        assert (await task).cause == "cancelled"
    assert not workers_left()


async def test_user_code_that_outlasted_its_cancellation_gets_no_second_budget_at_the_close(tmp_path, caplog):
    async with ScriptedEngine(Tokens([1]), label="abc-1") as engine, workers(tmp_path, cleanup_seconds=0.1) as pool:
        task = asyncio.create_task(pool.attempt(ask(engine, do="hang in cleaning", started=str(tmp_path / "s"))))
        await appears(tmp_path / "s")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await pool.close()
        assert "worker-0 is killed: 1 cancelled calls had not cleaned up within their budget" in caplog.text
    assert not workers_left()


async def test_an_environment_that_does_not_import_is_told_with_its_traceback(tmp_path):
    with pytest.raises(ConfigError, match="does not import: RuntimeError: boom") as caught:
        async with workers(tmp_path, count=2, code="raise RuntimeError('boom')"):
            pass
    assert "process_environment.py" in caught.value.detail
    assert not workers_left()


async def test_a_worker_that_ends_before_it_is_ready_is_named_with_its_log(tmp_path):
    with pytest.raises(WorkerFailed, match=r"worker-0 ended before it was ready; its log: .*worker-0\.log"):
        async with workers(tmp_path, code="import os; print('last words', flush=True); os._exit(3)"):
            pass
    assert "last words" in (tmp_path / "logs" / "worker-0.log").read_text()


PARENT = """
    import asyncio, sys
    from pathlib import Path
    import psutil
    from headway.adapters.workers.processes import ProcessWorkers
    from headway.settings import EnvironmentSection
    from headway.types import AttemptRequest, Prompt, SamplingParams

    async def main(base, do):
        cleanup = {"wait": 60.0, "block": 1.0}[do]  # which the one does not need, and the other uses up
        section = EnvironmentSection(entry="process_environment:attempt", workers=1, cleanup_seconds=cleanup)
        pool = await ProcessWorkers.start(section, base=base, model=base / "model", lineage="abc", logs=base / "logs")
        fields = {"do": do, "started": str(base / "s"), "cleaned": str(base / "c"), "seconds": 600}
        task = asyncio.create_task(
            pool.attempt(AttemptRequest(0, 0, 0, Prompt("p", 0, fields), "train", "http://x", 1, SamplingParams(), 0)))
        print(psutil.Process().children()[0].pid, flush=True)
        await task

    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""


@pytest.mark.parametrize("do", ["wait", "block"])
async def test_a_worker_ends_with_its_parent_however_that_ends(tmp_path, do):
    (tmp_path / "process_environment.py").write_text(textwrap.dedent(ENVIRONMENT))
    write_tokenizer(tmp_path / "model")
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(PARENT), str(tmp_path), do, stdout=asyncio.subprocess.PIPE
    )
    worker = psutil.Process(int(await parent.stdout.readline()))
    await appears(tmp_path / "s")
    parent.kill()
    await parent.wait()
    await until(lambda: has_ended(worker))
    assert (tmp_path / "c").exists() == (do == "wait")
