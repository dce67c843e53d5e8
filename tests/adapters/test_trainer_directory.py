import asyncio
import shutil

import pytest
from small_rollouts import small_batch

from headway.adapters.batch_store import DirectoryBatchStore
from headway.adapters.trainers.directory import DirectoryTrainer
from headway.errors import StorageError, TrainerFailed
from headway.formats.manifest import publish, read_manifest, staging, write_manifest
from headway.formats.offers import DeltaOffer
from headway.formats.run_directory import RunDirectory


class Child:
    """How the trainer process is doing, as its supervisor would say."""

    def __init__(self):
        self.ended = None
        self.asked = asyncio.Semaphore(0)

    def __call__(self):
        self.asked.release()
        return self.ended

    async def was_asked(self, times):
        for _ in range(times):
            await self.asked.acquire()


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    yield run
    run.close()


@pytest.fixture
def child():
    return Child()


@pytest.fixture
def trainer(run, child):
    return DirectoryTrainer(run, "ab12", 0.001, child)


def write_weights(run, version, *, lineage="ab12", kind="weights", number=None, extra=()):
    final = run.weight(version)
    temporary = staging(final)
    (temporary / "model.safetensors").write_bytes(b"weights %d" % version)
    write_manifest(temporary, kind=kind, lineage=lineage, id=version if number is None else number, extra=dict(extra))
    publish(temporary, final)


async def test_the_newest_complete_checkpoint_wins(run, trainer):
    for version in (1, 2, 3):
        write_weights(run, version)
    found = await trainer.checkpoint(0)
    assert (found.version, found.label, found.directory) == (3, "ab12-3", str(run.weight(3)))


async def test_none_is_overtaken_where_each_version_counts(run, child):
    trainer = DirectoryTrainer(run, "ab12", 0.001, child, each_version=True)
    for version in (1, 2, 4):
        write_weights(run, version)
    run.weight(3).mkdir()  # not complete, and never will be
    assert [(await trainer.checkpoint(after)).version for after in (0, 1, 2, 3)] == [1, 2, 4, 4]


async def test_what_the_trainer_offers_beside_the_directory_comes_with_the_checkpoint(run, trainer):
    write_weights(run, 1)
    assert (await trainer.checkpoint(0)).offers == {}
    write_weights(run, 2, extra={"offers": {"delta": {"base": 1, "directory": "deltas/00000002", "bytes": 9}, "carrier pigeon": 2}})
    assert (await trainer.checkpoint(1)).offers == {"delta": DeltaOffer(1, str(run.delta(2)), 9)}


async def test_offers_of_the_wrong_shape_are_left_out_with_one_warning(run, trainer, caplog):
    for version in (1, 2):
        write_weights(run, version, extra={"offers": {"delta": {"base": 7, "directory": "/etc", "bytes": 9}}})
        found = await trainer.checkpoint(version - 1)
        assert (found.version, found.offers) == (version, {})
    assert [record.message for record in caplog.records if "offers" in record.message] == [
        f"{run.weight(1)}: its offers are not used, the directory is: \"delta\": directory '/etc' must lie in the run directory"
    ]


async def test_a_checkpoint_published_while_waiting_is_found(run, trainer, child):
    write_weights(run, 1)
    waiting = asyncio.create_task(trainer.checkpoint(1))
    await child.was_asked(5)
    assert not waiting.done()
    await asyncio.to_thread(write_weights, run, 2)
    async with asyncio.timeout(120):
        assert (await waiting).version == 2


async def test_a_checkpoint_is_found_though_there_was_no_directory_for_weights_at_first(run, trainer, child):
    run.weights.rmdir()
    waiting = asyncio.create_task(trainer.checkpoint(0))
    await child.was_asked(3)
    run.weights.mkdir()
    await asyncio.to_thread(write_weights, run, 1)
    async with asyncio.timeout(120):
        assert (await waiting).version == 1


async def test_N02_N03_what_is_not_complete_or_not_ours_is_passed_over(run, trainer):
    write_weights(run, 1)
    run.weight(2).mkdir()
    (run.weight(2) / "model.safetensors").write_bytes(b"no manifest")
    write_weights(run, 3, lineage="cd34")
    write_weights(run, 4, kind="trainer")
    write_weights(run, 5, number=6)
    shutil.copytree(run.weight(1), run.weights / ".tmp-00000006-aa")
    shutil.copytree(run.weight(1), run.weights / "latest")
    assert (await trainer.checkpoint(0)).version == 1


async def test_damaged_weights_are_refused_by_the_file(run, trainer):
    write_weights(run, 1)
    (run.weight(1) / "model.safetensors").write_bytes(b"weights 2")
    with pytest.raises(StorageError, match=r"00000001/model\.safetensors: SHA-256 differs"):
        await trainer.checkpoint(0)


async def test_a_disk_that_does_not_answer_is_no_mystery(run, trainer):
    run.weights.rmdir()
    run.weights.write_text("no directory")
    with pytest.raises(StorageError, match=r"weights: what lies there cannot be listed: Not a directory"):
        await trainer.checkpoint(0)


async def test_a_trainer_that_ended_is_an_error_with_its_cause(run, trainer, child):
    waiting = asyncio.create_task(trainer.checkpoint(0))
    await child.was_asked(1)
    child.ended = "the trainer ended with exit code 1: see logs/trainer.log"
    with pytest.raises(TrainerFailed, match=r"logs/trainer\.log"):
        async with asyncio.timeout(120):
            await waiting


async def test_the_last_checkpoint_of_a_trainer_that_ended_is_still_taken(run, trainer, child):
    write_weights(run, 1)
    child.ended = "the trainer ended with exit code 0"
    assert (await trainer.checkpoint(0)).version == 1


async def test_only_a_complete_batch_of_this_lineage_can_be_submitted(run, trainer, child):
    with pytest.raises(StorageError, match="no complete batch"):
        await trainer.submit(0)
    await DirectoryBatchStore(run, "cd34").write(small_batch(1))
    with pytest.raises(StorageError, match="of this lineage"):
        await trainer.submit(1)
    await DirectoryBatchStore(run, "ab12").write(small_batch(0))
    assert read_manifest(run.batch(0)).id == 0
    await trainer.submit(0)
    child.ended = "the trainer ended"
    with pytest.raises(TrainerFailed, match="the trainer ended"):
        await trainer.submit(0)


async def test_metrics_are_those_of_the_trainer_with_null_for_what_is_no_number(run, trainer):
    assert await trainer.metrics(3) == {}
    run.trainer_metric(3).write_text('{"loss": 0.5, "grad_norm": NaN, "nested": {"max": -Infinity}}')
    assert await trainer.metrics(3) == {"loss": 0.5, "grad_norm": None, "nested": {"max": None}}


@pytest.mark.parametrize("content", ["", '{"loss": 0.', "[1]", "null"])
async def test_metrics_that_are_no_object_are_refused_by_the_file(run, trainer, content):
    run.trainer_metric(3).write_text(content)
    with pytest.raises(TrainerFailed, match=r"00000003\.json"):
        await trainer.metrics(3)
