"""Fault cases of scorers (O01, O05): user code that blocks, spins, misuses alarms or never returns costs its own score and its process."""

import asyncio
import json
import textwrap
import time

import psutil
import pytest
from ended_processes import has_ended
from shipped import dropped_groups, events_of
from small_models import write_tokenizer
from small_rollouts import small_rollout

from headway.adapters.workers.processes import ProcessWorkers
from headway.events import Admitted, Finished, RolloutDropped
from headway.flow.channels import Channel
from headway.flow.scorer import TRIES, Scorer
from headway.settings import EnvironmentSection
from headway.testing import EngineScript, EnvironmentScript, FakeEngine, Stage, TrainerScript
from headway.types import AttemptRequest, Failure, Prompt, Rollout, SamplingParams, ScoreRequest

pytestmark = pytest.mark.e2e

JUDGE = """
    import json, os, signal, time
    from asyncio import sleep
    from pathlib import Path

    def note(prompt):
        with (Path(__file__).parent / "stuck.jsonl").open("a") as log:
            log.write(json.dumps({"prompt": prompt.id, "pid": os.getpid(), "time": time.time()}) + "\\n")

    def alarmed(*_):
        raise TimeoutError("an alarm")

    def plain(prompt, rollouts):
        match prompt.id:
            case "p0001":
                note(prompt)
                time.sleep(100)
            case "p0010":
                note(prompt)
                while True:
                    pass
            case "p0019":
                note(prompt)
                signal.signal(signal.SIGALRM, alarmed)
        return [rollout.reward for rollout in rollouts]

    async def blocking(prompt, rollouts):
        if prompt.id == "p0019":
            note(prompt)
            signal.signal(signal.SIGALRM, alarmed)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            await sleep(100)
        return plain(prompt, rollouts)
"""
SETTINGS = {
    "run.steps": 10,
    "rollout.max_staleness": 8,  # nothing is tried again for its age
    "prompts.shuffle": False,
    "environment.score_scope": "group",
    "environment.score_timeout_seconds": 3,
    "environment.cleanup_seconds": 0.3,
    "environment.workers": 2,
    "rollout.max_prompt_failures": 1,
}


@pytest.mark.parametrize("scorer", ["plain", "blocking"])
def test_O01_a_scorer_that_sleeps_spins_or_sets_an_alarm_ends_at_its_timeout_with_its_process(tmp_path, scorer):
    """A plain function delays nobody; an async one that blocks delays its worker until it is killed, and the run goes on."""
    (tmp_path / "judge.py").write_text(textwrap.dedent(JUDGE))
    engine, trainer = EngineScript(token_seconds=0.02), TrainerScript(step_seconds=0.5)
    settings = {**SETTINGS, "environment.score": f"judge:{scorer}"}
    with Stage(tmp_path, engines=[engine], environment=EnvironmentScript(prompts=64), trainer=trainer, settings=settings) as stage:
        ended = stage.play()
        assert ended.code == 0, ended.err
        stage.check(ended)
        noted = [json.loads(line) for line in (tmp_path / "stuck.jsonl").read_text().splitlines()]
        sleeps, spins = (next(each for each in noted if each["prompt"] == prompt) for prompt in ("p0001", "p0010"))
        alarms = [each for each in noted if each["prompt"] == "p0019"]
        events = events_of(stage, Admitted, Finished, RolloutDropped)
        lost = {}
        tried = sum(isinstance(event, Admitted) and event.prompt_id == "p0019" for event in events)
        assert 1 <= len(alarms) <= TRIES * tried
        for stuck in (sleeps, spins, *alarms):
            group = next(event.group for event in events if isinstance(event, Admitted) and event.prompt_id == stuck["prompt"])
            lost[stuck["prompt"]] = [
                event for event in events if isinstance(event, RolloutDropped) and event.group == group and event.final
            ]
            assert dropped_groups(stage)[group][0] == "incomplete"
            assert not psutil.pid_exists(stuck["pid"])
        rows = [row["time"] for row in stage.rows("pipeline.jsonl")]
        written = []
        for stuck in (sleeps, spins):
            first = lost[stuck["prompt"]][0]
            assert (first.cause, "took longer than 3 s" in first.detail) == ("score_error", True)
            assert first.time - stuck["time"] >= 3 or scorer == "blocking"  # it may time out behind another that blocks its worker
            written += [time for time in rows if stuck["time"] < time < first.time]
            meanwhile = sum(isinstance(event, Finished) and stuck["time"] < event.time < first.time for event in events)
            assert meanwhile >= 4 or scorer == "blocking", "others proceed"
        assert lost["p0019"][0].cause in {"score_error", "worker_died"}  # the alarm hits user code, or the loop between
        log = (stage.run / "events.log").read_text()
        what = {"plain": "runs user code that was to end: it is to leave", "blocking": "blocks in user code that was to end: it is killed"}
        assert log.count(what[scorer]) >= 2
        assert written, "the orchestrator's own loop turns meanwhile"


STUCK_ATTEMPT = """
    import time
    from pathlib import Path
    from headway import Outcome

    async def attempt(prompt, policy):
        await (await policy.open([5])).generate()
        if prompt.id == "blocks":
            (Path(__file__).parent / "blocks").touch()
            time.sleep(1000)
        return Outcome(1.0)
"""


async def test_O01_an_attempt_that_blocks_for_ever_loses_its_process_at_its_deadline_and_nobody_else_his_rollout(tmp_path):
    """Until then its worker looks idle, and would draw whatever comes."""
    (tmp_path / "stuck_attempt.py").write_text(textwrap.dedent(STUCK_ATTEMPT))
    write_tokenizer(tmp_path / "model")
    section = EnvironmentSection(entry="stuck_attempt:attempt", workers=1, cleanup_seconds=0.1)
    pool = await ProcessWorkers.start(section, base=tmp_path, model=tmp_path / "model", lineage="abc", logs=tmp_path / "logs")
    try:
        async with FakeEngine(label="abc-0") as engine, asyncio.timeout(120):

            def attempted(prompt):
                request = AttemptRequest(0, 0, 0, Prompt(prompt, 0, {}), "train", engine.url, 17, SamplingParams(max_tokens=4), 0)
                return asyncio.create_task(pool.attempt(request))

            stuck = attempted("blocks")
            while not (tmp_path / "blocks").exists():  # noqa: ASYNC110 -- the other process signals nothing
                await asyncio.sleep(0.01)
            neighbour = attempted("another")
            stuck.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stuck
            failed = await neighbour
            assert (failed.cause, failed.retryable) == ("worker_died", True)
            assert isinstance(await attempted("another"), Rollout)
            assert pool.restarts == 1
    finally:
        await pool.close()


SLOW_JUDGE = """
    import os, threading

    together = threading.Barrier(AT_ONCE)

    async def attempt(prompt, policy):
        raise AssertionError("these prompts are only scored")

    def score(prompt, rollouts):
        if prompt.id.startswith("first"):  # one after the other they would wait for ever
            together.wait()
        if prompt.id.endswith("never"):
            threading.Event().wait()
        return float(os.getpid())
"""
TIMEOUT, CLEANUP, AT_ONCE = 8.0, 0.1, 8


async def whole(rollouts):
    return tuple(rollouts)


async def test_O05_scores_run_at_once_and_those_that_never_end_are_failed_and_leave_the_pool_usable(tmp_path):
    """64 scores by a plain function, 8 at once, 2 of which never end."""
    (tmp_path / "slow_judge.py").write_text(textwrap.dedent(SLOW_JUDGE).replace("AT_ONCE", str(AT_ONCE)))
    write_tokenizer(tmp_path / "model")
    section = EnvironmentSection(entry="slow_judge:attempt", score="slow_judge:score", workers=1, cleanup_seconds=CLEANUP)
    pool = await ProcessWorkers.start(section, base=tmp_path, model=tmp_path / "model", lineage="abc", logs=tmp_path / "logs")
    scorer = Scorer(
        finished=Channel(1),
        score=pool.score,
        scope="rollout",
        concurrency=AT_ONCE,
        timeout_seconds=TIMEOUT,
        load=whole,
        record=lambda event: None,
        clock=time.time,
    )

    async def scored(names):
        requests = [ScoreRequest(n, Prompt(name, 0, {}), (small_rollout(n),)) for n, name in enumerate(names)]
        return await asyncio.gather(*map(scorer.score, requests))

    try:
        [[first]] = await scored(["quick"])
        process = psutil.Process(int(first.reward))
        results = await scored([f"{'first' if n < AT_ONCE else n} {'never' if n in {3, 40} else ''}" for n in range(64)])
        failed = {n: result for n, result in enumerate(results) if isinstance(result, Failure)}
        assert {n: failure.cause for n, failure in failed.items()} == {3: "score_error", 40: "score_error"}
        [[again]] = await scored(["quick"])
        assert again.reward != first.reward, "another process"
        async with asyncio.timeout(120):
            while not has_ended(process):  # noqa: ASYNC110 -- it signals nothing
                await asyncio.sleep(0.01)
    finally:
        await pool.close()
