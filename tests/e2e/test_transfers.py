"""Runs of headway's own engine and trainer whose weights go by deltas, or through shared memory, also when somebody is killed."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from killed_runs import SLOW
from real_runs import LIMIT, Bench, Ended, Run, audit, history, interrupt, until

from headway.events import Published
from headway.formats.manifest import read_manifest
from headway.formats.offers import read_offers
from headway.formats.run_directory import numbered
from headway.formats.shared_memory import is_available, memory_of

pytestmark = [pytest.mark.e2e, pytest.mark.torch]

# In bfloat16, steps as small as these never move a norm of ones (its neighbours are 0.4 % away): every delta has something to leave out.
DELTA = ["engine.weight_transfer=delta", "trainer.dtype=bfloat16", "trainer.learning_rate=1e-5", "trainer.keep_checkpoints=3"]
# One group of the batch after next is under way, never all three: no version is made before the one before it is served, and none skipped.
EACH = ["rollout.steps_ahead=0.4"]
MEMORY = ["engine.weight_transfer=memory"]

needs_memory = pytest.mark.skipif(not is_available(), reason="no /dev/shm here")


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Bench]:
    """Runs that start everything themselves."""
    bench = Bench(tmp_path, url="", checkpoint=Path())
    yield bench
    bench.close()


def loads(ended: Ended) -> list[tuple[int, str]]:
    """Return the versions that the engine has loaded, and how, in order."""
    said = (ended.run.directory / "events.log").read_text()
    assert "from its complete directory" not in said, said  # nothing that was chosen proved to be no good
    return [
        (int(version), how) for version, how in re.findall(r"has loaded \w+-(\d+) (by what has changed|from memory|from its dir)", said)
    ]


def assert_learned(ended: Ended, steps: int) -> None:
    """The run did its steps on tokens of the weights that they are stamped with: the trainer finds the engine's log-probabilities."""
    assert (ended.code, ended.recorded["cause"]) == (0, f"all {steps} steps are trained"), ended.err
    assert audit(ended, max_staleness=2).trained == steps
    for row in ended.rows("metrics.jsonl"):
        assert row["mismatch_kl"] is None or abs(row["mismatch_kl"]) < 0.02, row


def until_published(run: Run, version: int) -> None:
    """Wait until a version lies in the run directory."""
    until(
        lambda: max(numbered(run.directory / "weights"), default=0) >= version or run.process.poll() is not None, what=f"version {version}"
    )
    assert run.process.poll() is None, run.process.communicate()


def test_weights_go_by_deltas_and_an_engine_that_was_killed_comes_back_with_all_of_them(own: Bench):
    own.hold(4)
    run = own.start("run.steps=10", *SLOW, *DELTA, *EACH, attached=False)
    until_published(run, 4)
    run.child(" engine ").kill()
    own.go_on()
    ended = run.end()
    assert_learned(ended, 10)
    assert ended.rows("pipeline.jsonl")[-1]["engine_restarts"] == 1
    by_delta = {version for version, how in loads(ended) if how == "by what has changed"}
    assert by_delta >= {1, 2, 3, 6, 7, 8, 9, 10}  # an engine that has come back was given 4 whole, or 5 if a batch was formed before
    assert [event.version for event in history(ended) if isinstance(event, Published)][-1] == 10
    weights = numbered(ended.run.directory / "weights")
    assert set(numbered(ended.run.directory / "deltas")) <= set(weights)
    manifest = read_manifest(ended.run.directory / "weights" / "00000010")
    assert manifest is not None
    offers, _ = read_offers(manifest.extra["offers"], run=ended.run.directory, version=10)
    assert offers["delta"].base == 9


@needs_memory
def test_weights_go_through_memory_and_nothing_is_left_there_though_the_trainer_was_killed(own: Bench):
    own.hold(3)
    run = own.start("run.steps=8", *SLOW, *MEMORY, *EACH, attached=False)
    until_published(run, 4)
    until(lambda: "-4 from memory" in (run.directory / "events.log").read_text(), what="the engine has loaded the last that there is")
    memory = memory_of(run.info()["id"])
    assert 4 in numbered(memory)
    run.child(" trainer ").kill()
    own.go_on()
    ended = run.end()
    assert_learned(ended, 8)
    assert {version for version, how in loads(ended) if how == "from memory"} >= set(range(1, 9))
    assert not memory.exists()


@needs_memory
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_in_memory_when_the_run_is_ended_from_outside(own: Bench, number: signal.Signals):
    run = own.start("run.steps=100000", *SLOW, *MEMORY, attached=False)
    until_published(run, 2)
    memory = memory_of(run.info()["id"])
    until(lambda: numbered(memory), what="a version lies in memory")
    interrupt(run, number)
    run.process.wait(LIMIT)
    until(lambda: not memory.exists(), what=f"{memory} is gone")


@needs_memory
def test_a_trainer_that_is_given_up_leaves_nothing_in_memory(own: Bench):
    run = own.start("run.steps=100000", "trainer.max_restarts=0", *SLOW, *MEMORY, attached=False)
    until_published(run, 2)
    memory = memory_of(run.info()["id"])
    until(lambda: numbered(memory), what="a version lies in memory")
    run.child(" trainer ").kill()
    ended = run.end(sabotaged=True)  # it may have been killed while it removed an old version, which a successor would finish
    assert (ended.code, ended.last_error.rpartition(" ")[2]) == (1, "[trainer]")
    assert not memory.exists()
