"""What a pause costs and what it keeps: nothing is read from a disk within one, and no engine writes under a label that is not its own."""

import shutil

import pytest
from synced_engines import KINDS, LOADS, MODES, SLOW, checkpoint, in_flight, served, sync

from headway.errors import EngineFailed, StorageError
from headway.formats.tensor_headers import bytes_in, read_tensors
from headway.testing import Reply, Rule
from headway.types import Checkpoint


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


async def test_how_large_a_checkpoint_is_was_read_before_the_pause(tmp_path, kind):
    loaded = Rule(match={"path": LOADS[kind], "weights": "5"}, do=Reply(json={"success": True, "results": [None]}))
    async with served(kind, loaded) as (_, admin):
        await sync(admin, checkpoint(tmp_path, 4))
        weights = checkpoint(tmp_path, 5)
        size = bytes_in(read_tensors(tmp_path / "5").values())
        await admin.prepare(weights)
        shutil.rmtree(weights.directory)  # from here on it is the engine's to read
        done = await admin.transfer(weights)
        assert (done.way, done.bytes) == ("directory", size)
        await admin.abandon()


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
async def test_an_engine_that_cannot_be_told_that_its_weights_are_nobodys_stays_paused_until_a_sync_goes_well(tmp_path, kind, mode):
    broken = Rule(match={"path": LOADS[kind], "weights": "5"}, do=Reply(status=500, text="no memory"))
    deaf = Rule(match={"path": "/update_weight_version", "version": "unknown"}, do=Reply(status=500, text="no"))
    async with served(kind, SLOW, broken, deaf, **mode) as (server, admin):
        await sync(admin, checkpoint(tmp_path, 4))
        bad = checkpoint(tmp_path, 5)
        if mode["weight_sync"] != "wait":
            async with in_flight(server, kind):
                await fails_to_load(admin, bad)
            assert [[label for label, *_ in entry["labels"]] for entry in server.log.of("finished")] == [["abc-4"]]
        else:
            await fails_to_load(admin, bad)
        assert (server.weights.label, server.paused) == ("abc-4", True)
        with pytest.raises(StorageError, match="must be a Hugging Face checkpoint"):
            await admin.prepare(Checkpoint(6, "abc-6", str(tmp_path / "nowhere")))
        await admin.abandon()
        assert server.paused, "its weights are still of no version"
        await sync(admin, checkpoint(tmp_path, 7))
        assert (await admin.label(), server.paused) == ("abc-7", False)
        await admin.abandon()
        assert (await admin.label(), server.paused) == ("abc-7", False)


async def test_at_the_end_of_the_run_it_is_resumed(tmp_path, kind):
    broken = Rule(match={"path": LOADS[kind], "weights": "5"}, do=Reply(status=500, text="no memory"))
    deaf = Rule(match={"path": "/update_weight_version", "version": "unknown"}, do=Reply(status=500, text="no"))
    async with served(kind, broken, deaf) as (server, admin):
        await sync(admin, checkpoint(tmp_path, 4))
        await fails_to_load(admin, checkpoint(tmp_path, 5))
        assert server.paused
        await admin.close()
        assert not server.paused


async def fails_to_load(admin, bad):
    await admin.prepare(bad)
    with pytest.raises(EngineFailed, match="no memory"):
        await admin.transfer(bad)
    await admin.abandon()
