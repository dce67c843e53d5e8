"""However a run ends, by a signal, by a crash, by kill -9: its exit code and run.json say how, and nothing of it stays behind."""

import signal
from functools import partial

import pytest
from real_runs import Bench, audit, interrupt, until
from stand_in_servers import write_stand_ins

pytestmark = [pytest.mark.e2e, pytest.mark.torch]

LONG = ["run.steps=100000", "environment.entry=world:slow"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_one_signal_drains_the_run(bench: Bench, number: signal.Signals):
    run = bench.start(*LONG)
    run.until_batch(1)
    interrupt(run, number)
    ended = run.end()
    assert ended.code == 128 + number
    assert (ended.recorded["code"], ended.recorded["cause"]) == (128 + number, f"interrupted by {number.name}")
    assert f"{number.name}: draining; once more stops now" in ended.err
    assert audit(ended, max_staleness=2).trained >= 2


def test_a_second_ctrl_c_stops_it_now(bench: Bench):
    bench.world("async def stuck(prompt, policy):\n    await play(policy)\n    await asyncio.sleep(600)\n")
    run = bench.start("environment.entry=world:stuck", "rollout.timeout_seconds=0", "run.drain_timeout_seconds=600")
    run.until_row(lambda row: row["rollouts_in_flight"], what="a rollout is in flight, which ends in ten minutes")
    interrupt(run)
    assert run.process.stderr is not None
    until(lambda: "once more stops now" in run.process.stderr.readline())
    interrupt(run)
    ended = run.end()
    assert ended.code == 130
    assert ended.recorded["cause"] == "Interrupted: stopped by SIGINT before it had drained"


def test_a_signal_that_comes_while_everything_starts_ends_the_run_too(bench: Bench):
    packages = write_stand_ins(bench.directory / "packages")
    never = f'engine.environment=["PYTHONPATH={packages}", "STAND_IN_LOG={bench.directory}", "STAND_IN_ACT=never"]'  # is it ready
    run = bench.start("engine.launch=vllm", never, attached=False)
    until((run.directory / "run.json").exists)
    interrupt(run)
    ended = run.end()
    assert (ended.code, ended.err) == (130, "headway: stopped by SIGINT before it had drained\n")
    assert ended.recorded["code"] == 130


BLOCKING = """
def at_once():
    open("waiting", "w").close()
    time.sleep(600)
    yield

def later():
    yield from ({"id": str(n)} for n in range(6))
    time.sleep(600)
"""


def test_prompts_that_block_can_be_interrupted(bench: Bench):
    bench.world(BLOCKING)
    run = bench.start("prompts.source=world:at_once", "prompts.shuffle=false")
    until((bench.directory / "waiting").exists)
    interrupt(run, signal.SIGTERM)
    ended = run.end()
    assert (ended.code, ended.err) == (143, "headway: stopped by SIGTERM before it had drained\n")
    assert not run.directory.exists()


def test_prompts_that_block_later_hold_up_neither_the_drain_nor_the_end(bench: Bench):
    bench.world(BLOCKING)
    run = bench.start("prompts.source=world:later", "prompts.shuffle=false")
    run.until_batch(0)
    interrupt(run)
    ended = run.end()
    assert ended.code == 130
    audit(ended, max_staleness=2)


def test_kill_9_of_the_orchestrator_takes_along_what_the_environment_has_started(bench: Bench):
    bench.world(
        "async def forks(prompt, policy):\n    subprocess.Popen(['sleep', '600'])\n    return Outcome(await play(policy))\n"
        "async def stuck(prompt, policy):\n    subprocess.Popen(['sleep', '600'])\n    time.sleep(600)\n"
    )
    for entry in ("forks", "stuck"):
        run = bench.start("run.steps=100000", f"environment.entry=world:{entry}", name=entry)
        until(partial(run.marked, "sleep 600"))
        run.process.kill()
        run.until_gone()
        assert run.info()["ended"] is None
        run.kill()


def test_kill_9_while_everything_starts_takes_the_children_along(bench: Bench):
    run = bench.start(*LONG, attached=False)
    until(lambda: run.marked(" engine ") and run.marked(" trainer "))
    run.process.kill()
    run.until_gone()


def test_a_trainer_that_has_trained_its_steps_may_end_while_the_last_version_is_evaluated(bench: Bench):
    bench.world(
        "def held_out():\n    return [{'id': 'held-out'}]\n"
        "async def late(prompt, policy):\n    reward = await play(policy)\n"
        "    await asyncio.sleep(8 * (prompt.id == 'held-out'))\n    return Outcome(reward)\n"
    )
    ended = bench.play("run.steps=2", "environment.entry=world:late", "eval.prompts=world:held_out", attached=False)
    assert (ended.code, ended.recorded["cause"]) == (0, "all 2 steps are trained")
    assert [row["version"] for row in ended.rows("eval.jsonl")] == [2]
