import json

import pytest
from small_rollouts import small_batch

from headway.adapters.batch_store import DirectoryBatchStore, metrics_of, remove_batches, stored_batch
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


async def test_a_batch_tells_of_itself_and_of_its_metrics_row_in_values_of_json(run):
    row = await DirectoryBatchStore(run, "ab12").write(small_batch(3, version=2))
    found = stored_batch(run, 3)
    assert (found.lineage, found.max_staleness, found.on_stale) == ("ab12", 2, "mask")
    assert found.row == metrics_of(run, 3) == json.loads(json.dumps(row))
    assert stored_batch(run, 4) is metrics_of(run, 4) is None


async def test_batches_are_removed_from_one_on(run):
    for k in (0, 1, 5):
        await DirectoryBatchStore(run, "ab12").write(small_batch(k, version=k))
    (run.batch(7)).mkdir()
    await DirectoryBatchStore(run, "theirs").write(small_batch(9, version=9))
    assert remove_batches(run, 1, lineages={"ab12": None}) == [1, 5, 7, 9]
    foreign, kept = sorted(path.name for path in run.batches.iterdir())
    assert kept == "00000000"
    assert foreign.startswith(".foreign-00000009-"), "what is another run's is not removed"
