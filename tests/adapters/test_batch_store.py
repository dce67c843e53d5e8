import pytest
from small_rollouts import small_batch

from headway.adapters.batch_store import DirectoryBatchStore
from headway.errors import StorageError
from headway.formats.batch import read_batch
from headway.formats.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    yield run
    run.close()


async def test_a_batch_lies_complete_when_its_metrics_row_is_returned(run):
    row = await DirectoryBatchStore(run, "ab12").write(small_batch(3, version=2))
    batch = read_batch(run.batch(3))
    assert (batch.k, batch.lineage, batch.min_contributing_version) == (3, "ab12", 2)
    assert (row["batch"], row["token_staleness_max"], row["contributing_tokens"]) == (3, 1, batch.contributing_tokens)


async def test_what_cannot_be_written_is_a_storage_error_and_leaves_no_batch(run):
    run.batches.rmdir()
    run.batches.write_bytes(b"a file where a directory should be")
    with pytest.raises(StorageError, match=r"batches.*cannot be created"):
        await DirectoryBatchStore(run, "ab12").write(small_batch())
