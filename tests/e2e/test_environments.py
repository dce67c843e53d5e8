"""User code that does what it should not: it costs members, never the run; and where nothing else is left, the run ends by its cause."""

import re

import pytest
from real_runs import Bench, audit, interrupt

pytestmark = [pytest.mark.e2e, pytest.mark.torch]

MISCHIEF = """
def of(value):
    async def end(policy):
        await play(policy)
        return value
    return end

async def silent(policy):
    return Outcome(1.0)

async def raises(policy):
    await play(policy)
    raise RuntimeError("two\\nlines")

async def leaves(policy):
    sys.exit(3)

async def interrupts(policy):
    raise KeyboardInterrupt

async def cancels(policy):
    asyncio.current_task().cancel()
    await asyncio.sleep(60)

async def hangs(policy):
    await play(policy)
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        return Outcome(1.0)

async def forks(policy):
    subprocess.Popen(["sleep", "600"])
    return Outcome(await play(policy), metadata={"nan": float("nan")})

async def holds_memory(policy):
    ballast = bytearray(20_000_000)
    return Outcome(await play(policy), metadata={"bytes": len(ballast)})

async def blocks(policy):
    time.sleep(0.2)
    return Outcome(await play(policy))

async def odd_metadata(policy):
    return Outcome(await play(policy), metadata={"it": object()})

MISCHIEVOUS = [
    of(Outcome(float("nan"))), of(Outcome(float("inf"))), of(Outcome(None)), of(Outcome("0.5")), of(Outcome(True)), of(0.5), of(None),
    silent, raises, leaves, interrupts, cancels, hangs, forks, holds_memory, blocks, odd_metadata,
]

async def mischief(prompt, policy):
    n = next(calls)
    if n % 4:
        return Outcome(await play(policy))
    return await MISCHIEVOUS[n // 4 % len(MISCHIEVOUS)](policy)
"""


def test_whatever_single_attempts_do_the_run_goes_on_and_counts_it(bench: Bench):
    bench.world(MISCHIEF)
    settings = ["environment.entry=world:mischief", "rollout.timeout_seconds=4", "rollout.max_attempts=2", "run.steps=100000"]
    settings += ["environment.cleanup_seconds=60"]  # they all clean up at once: a worker is killed only where the machine stands still
    run = bench.start(*settings, "rollout.group_size=6", "rollout.max_concurrent=60")
    causes = {"bad_reward", "environment_error", "empty_completion", "timeout"}
    run.until_row(lambda row: all(row["lost"][cause] for cause in causes) and row["batch"] >= 8, what="all has happened, and it goes on")
    interrupt(run)
    ended = run.end()
    assert ended.code == 130, ended.err
    lost = audit(ended, max_staleness=2).lost
    assert causes <= set(lost)
    assert "worker_died" not in lost


ENDS_ITS_PROCESS = """
async def ends(prompt, policy):
    reward = await play(policy)
    if next(calls) == 15:
        os._exit(3)
    return Outcome(reward)
"""


def test_a_worker_that_user_code_ends_is_replaced(bench: Bench):
    bench.world(ENDS_ITS_PROCESS)
    ended = bench.play("environment.entry=world:ends", "environment.workers=2")
    assert ended.code == 0, ended.err
    assert audit(ended, max_staleness=2).lost["worker_died"] > 0


ALWAYS_RAISES = "async def attempt(prompt, policy):\n    raise RuntimeError('two\\nlines')\n"
ALL_ALIKE = "async def attempt(prompt, policy):\n    await play(policy)\n    return Outcome(0.5)\n"
NO_NUMBER = "async def attempt(prompt, policy):\n    await play(policy)\n    return Outcome('0.5')\n"
ENDS = {
    "it always raises": (
        ALWAYS_RAISES,
        r"^headway: 9 attempts in a row .*; the last: environment_error: RuntimeError: two lines \(world\.py, line \d+, in attempt\)$",
        "EnvironmentFailed",
    ),
    "all score alike": (
        ALL_ALIKE,
        r"^headway: 12 groups in a row had nothing .*: groups whose members all scored alike \d+.*: does it ever vary within a group\?$",
        "EmptyBatches",
    ),
    "no reward is a number": (
        NO_NUMBER,
        r"groups dropped as incomplete \d+; the last lost was bad_reward: the reward is '0\.5': it must be a finite number$",
        "EmptyBatches",
    ),
}


@pytest.mark.parametrize(("code", "says", "kind"), ENDS.values(), ids=ENDS)
def test_an_environment_that_never_works_ends_the_run_by_name(bench: Bench, code: str, says: str, kind: str):
    bench.world(code)
    patience = 9 if kind == "EnvironmentFailed" else 0
    ended = bench.play(f"run.max_consecutive_failures={patience}", "run.max_empty_batches=4", "environment.workers=0")
    assert ended.code == 1
    line, _, whose = ended.last_error.rpartition(" ")
    assert re.search(says, line)
    assert (whose, ended.recorded["kind"]) == ("[environment]", "environment")
    assert ended.recorded["cause"] == f"{kind}: {line.removeprefix('headway: ')}"
    assert ended.out == ""
