"""The bound's modes in real runs, and rollouts from elsewhere: what was configured is what the files say."""

import itertools
import json
import math
import signal
import urllib.error
import urllib.request
from collections import Counter

import pytest
from real_runs import LIMIT, Bench, Run, audit, history, interrupt, until

from headway.events import GroupDropped, Ingested

pytestmark = [pytest.mark.e2e, pytest.mark.torch]

UNEVEN = """
async def uneven(prompt, policy):
    reward = await play(policy)
    await asyncio.sleep(0.4 * (next(calls) % 5 == 0))
    return Outcome(reward)
"""


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        (["rollout.on_stale=wait", "rollout.max_staleness=1"], 1),
        (["rollout.on_stale=drop", "rollout.max_staleness=1"], 1),
        (["rollout.on_stale=mask", "rollout.enforce=ship", "rollout.max_staleness=1"], 1),
        (["rollout.on_stale=drop", "rollout.enforce=ship", "rollout.max_staleness=1"], 1),
        (["rollout.on_stale=train", "rollout.max_staleness=1"], math.inf),
        (["rollout.steps_ahead=auto"], 2),
        (["rollout.batch_tokens=80", "rollout.max_rollout_tokens=6"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_run_ends_and_keeps_its_bound_in_every_mode(bench: Bench, settings: list[str], bound: float):
    bench.world(UNEVEN)
    ended = bench.play("run.steps=5", "environment.entry=world:uneven", *settings)
    assert ended.code == 0, ended.err
    audit(ended, max_staleness=bound)


@pytest.mark.parametrize("poll_seconds", [0.1, 3.0], ids=["every version is met", "the trainer is three versions on at the first look"])
def test_an_exact_lag_is_exact(bench: Bench, poll_seconds: float):
    settings = ["rollout.max_staleness=2", "rollout.steps_ahead=2", "debug.publish_lag=2", f"trainer.poll_seconds={poll_seconds}"]
    ended = bench.play("run.steps=6", *settings)
    assert ended.code == 0, ended.err
    audit(ended, max_staleness=2)
    rows = ended.rows("metrics.jsonl")
    assert [row["token_staleness_mean"] for row in rows] == [0, 1, 2, 2, 2, 2]


def offered(run: Run, body: object, token: str | None = None) -> int:
    address = json.loads((run.directory / "ingest.json").read_bytes())
    request = urllib.request.Request(address["url"] + "/v1/rollouts", json.dumps(body).encode(), method="POST")
    request.add_header("Authorization", f"Bearer {address['token'] if token is None else token}")
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=LIMIT) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def group(name: str) -> dict[str, object]:
    sample = {"token_ids": [1, 5, 6], "sampled_mask": [False, True, True], "logprobs": [0.0, -1.0, -0.5]}
    return {"name": name, "rollouts": [{"reward": reward, "samples": [sample]} for reward in (0.0, 1.0)]}


def test_what_is_posted_is_trained_or_refused_and_never_lost(bench: Bench):
    bench.world(UNEVEN)
    run = bench.start("run.steps=100000", "environment.entry=world:uneven", "ingest.port=0", "rollout.replayed_groups=1")
    until(lambda: (run.directory / "ingest.json").exists() or run.process.poll() is not None)
    assert (run.directory / "ingest.json").stat().st_mode & 0o777 == 0o600
    assert offered(run, group("x"), token="wrong") == 401
    assert offered(run, {**group("x"), "rollouts": []}) == 400
    answers: Counter[int] = Counter()
    names = itertools.count()
    while not answers[202] or sum(answers.values()) < 12:
        answers[offered(run, group(f"posted-{next(names)}"))] += 1
        assert run.process.poll() is None, run.process.communicate()
    interrupt(run, signal.SIGTERM)
    ended = run.end()
    assert ended.code == 143, ended.err
    audit(ended, max_staleness=2)
    assert set(answers) <= {202, 429, 503}
    events = history(ended)
    ingested = {event.group for event in events if isinstance(event, Ingested)}
    dropped = {event.group for event in events if isinstance(event, GroupDropped)} & ingested
    trained = sum(row["replayed_groups"] for row in ended.rows("metrics.jsonl"))
    assert len(ingested) >= answers[202]
    assert trained + len(dropped) <= len(ingested) <= trained + len(dropped) + 3  # the rest was in line when the run drained
    assert not (run.directory / "ingest.json").exists()


def test_batches_of_an_earlier_run_are_replayed_beside_live_groups(bench: Bench):
    first = bench.play("run.steps=2", name="first")
    assert first.code == 0, first.err
    files = f'replay.files=["{first.run.directory}/batches/*/rollouts.parquet"]'
    run = bench.start("run.steps=100000", files, "rollout.replayed_groups=1", name="second")

    until(lambda: sum(row["replayed_groups"] for row in run.rows("metrics.jsonl")) >= 2, what="two groups are replayed")
    interrupt(run, signal.SIGTERM)
    second = run.end()
    assert second.code == 143, second.err
    audit(second, max_staleness=2)
    rows = second.rows("metrics.jsonl")
    assert all(row["replayed_groups"] <= 1 and row["groups"] == 3 for row in rows[:-1])  # the last takes what is left at the drain
