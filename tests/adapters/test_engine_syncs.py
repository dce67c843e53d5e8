"""Weight syncs of both kinds of engine, over real HTTP: each mode, what fails and is done again, what is held meanwhile."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synced_engines import KINDS, LOADS, MODES, SLOW, checkpoint, generate, in_flight, served, sync

from headway.adapters.engines.calls import CallRefused
from headway.errors import EngineFailed
from headway.formats.hold import is_held
from headway.testing import EngineScript, Reply, Rule


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.mark.parametrize("mode", MODES)
async def test_a_sync_under_load_ends_in_the_new_version_with_every_token_stamped_right(tmp_path, kind, mode):
    async with served(kind, SLOW, **MODES[mode]) as (server, admin):
        await sync(admin, checkpoint(tmp_path, 4))
        async with in_flight(server, kind) as end_soon:
            syncing = asyncio.create_task(sync(admin, checkpoint(tmp_path, 5)))
            if mode == "wait":  # for the generation
                await server.until(lambda: server.paused, limit=120.0)
                end_soon()
            await syncing
            assert not server.paused
        await generate(server, kind, 4)  # its prompt may be cached by now
        assert await admin.label() == "abc-5"
        before, after = server.log.of("finished")
    assert before["loaded"] == [(int(label.removeprefix("abc-")), start, end) for label, start, end in before["labels"]]
    stamped = [label for label, *_ in before["labels"]]
    assert stamped == (["abc-4", "abc-5"] if mode in {"recompute", "keep"} else ["abc-4"])
    assert before["finish"] == ("abort" if mode == "abort" else "stop")
    assert not before["disconnected"]
    assert [label for label, *_ in after["labels"]] == ["abc-5"]
    assert after["stale_hits"] == 0


CALLS = {
    "vllm": {
        "recompute": ["/pause", "/collective_rpc", "/update_weight_version", "/resume", "/weight_info"],
        "keep": ["/pause", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache", "/resume", "/weight_info"],
        "abort": ["/pause", "/collective_rpc", "/update_weight_version", "/resume", "/weight_info"],
        "wait": ["/pause", "/collective_rpc", "/update_weight_version", "/resume", "/weight_info"],
    },
    "sglang": {
        "recompute": ["/pause_generation", "/update_weights_from_disk", "/continue_generation", "/model_info"],
        "keep": ["/pause_generation", "/update_weights_from_disk", "/flush_cache", "/continue_generation", "/model_info"],
        "abort": ["/pause_generation", "/update_weights_from_disk", "/continue_generation", "/model_info"],
        "wait": ["/continue_generation", "/update_weights_from_disk", "/continue_generation", "/model_info"],
    },
}
PAUSES: dict[str, Any] = {
    "vllm": {"recompute": "keep", "keep": "keep", "abort": "abort", "wait": "wait"},
    "sglang": {"recompute": "retract", "keep": "in_place", "abort": "abort", "wait": None},
}


@pytest.mark.parametrize("mode", MODES)
async def test_a_sync_is_these_calls_and_one_token_once_the_engine_has_been_heard(tmp_path, kind, mode):
    async with served(kind, **MODES[mode]) as (server, admin):
        await sync(admin, checkpoint(tmp_path, 4))
        assert len(server.log.of("probed")) == 3
        asked = len(server.log.of("asked"))
        await sync(admin, checkpoint(tmp_path, 5))
        calls = server.log.of("asked")[asked:]
        assert [call["path"] for call in calls] == CALLS[kind][mode]
        assert (calls[0]["query"].get("mode") or calls[0]["body"].get("mode")) == PAUSES[kind][mode]
        [*_, probed] = server.log.of("probe_answered")
        assert len(server.log.of("probe_answered")) == 4
        assert len(probed["ids"]) == 1


async def test_sglang_with_requests_in_flight_that_refuses_to_drop_its_prefixes_gives_up_their_contexts(tmp_path):
    busy = Rule(match={"path": "/flush_cache"}, nth=(2,), do=Reply(status=400, text="Flush cache failed: there are pending requests"))
    async with served("sglang", busy, **MODES["keep"]) as (server, admin):
        await sync(admin, checkpoint(tmp_path, 4))
        asked = len(server.log.of("asked"))
        await sync(admin, checkpoint(tmp_path, 5))
        calls = [(call["path"], call["body"].get("mode")) for call in server.log.of("asked")[asked:]]
    assert calls[2:5] == [("/flush_cache", None), ("/pause_generation", "retract"), ("/flush_cache", None)]


# ---------------------------------------------------------------------------------------------------------------------- what has gone wrong


async def test_a_load_that_fails_once_is_done_again(tmp_path, kind):
    async with served(kind, Rule(match={"path": LOADS[kind]}, nth=(1,), do=Reply(status=500, text="no memory"))) as (server, admin):
        await sync(admin, checkpoint(tmp_path, 4))
        assert await admin.label() == "abc-4"
        assert [entry["path"] for entry in server.log.of("asked")].count(LOADS[kind]) == 2


async def test_a_load_that_an_sglang_answers_by_no_success_is_refused_as_one_by_a_status(tmp_path):
    """So that a delta which it cannot load is followed by the whole checkpoint in the same sync."""
    no = Rule(match={"path": LOADS["sglang"]}, do=Reply(json={"success": False, "message": "no such tensor"}))
    async with served("sglang", no) as (_, admin):
        weights = checkpoint(tmp_path, 4)
        await admin.prepare(weights)
        with pytest.raises(CallRefused, match="no such tensor"):
            await admin.transfer(weights)
        await admin.abandon()


async def test_while_a_load_has_not_succeeded_nothing_goes_on_and_afterwards_no_token_passes_for_a_version(tmp_path, kind):
    broken = Rule(match={"path": LOADS[kind], "weights": "5"}, do=Reply(status=500, text="no memory"))
    async with served(kind, SLOW, broken) as (server, admin):
        await sync(admin, checkpoint(tmp_path, 4))
        async with in_flight(server, kind):
            bad = checkpoint(tmp_path, 5)
            await admin.prepare(bad)
            with pytest.raises(EngineFailed, match="no memory"):
                await admin.transfer(bad)
            assert server.paused
            await admin.abandon()
            assert not server.paused
        assert await admin.label() == "unknown"
        [finished] = server.log.of("finished")
        assert [label for label, *_ in finished["labels"]] == ["abc-4"], "what it had in flight is over, and all of one version"
        await sync(admin, checkpoint(tmp_path, 6))
        assert await admin.label() == "abc-6"


CACHES = {"vllm": "/reset_prefix_cache", "sglang": "/flush_cache"}


async def test_prefixes_of_older_weights_that_could_not_be_dropped_pass_for_no_version(tmp_path, kind):
    """With recompute_kv = false they are there until they are dropped, and what comes next would be written on top of them."""
    stuck = Rule(match={"path": CACHES[kind]}, after=1, do=Reply(status=500, text="busy"))
    async with served(kind, stuck, **MODES["keep"]) as (server, admin):
        await sync(admin, checkpoint(tmp_path, 4))
        with pytest.raises(EngineFailed, match="busy"):
            await sync(admin, checkpoint(tmp_path, 5))
        await admin.abandon()
        assert (await admin.label(), server.paused) == ("unknown", False)


async def test_abandoned_before_anything_was_loaded_an_engine_serves_on_as_before(tmp_path, kind):
    async with served(kind, SLOW) as (server, admin):
        await sync(admin, checkpoint(tmp_path, 4))
        async with in_flight(server, kind):
            await admin.prepare(checkpoint(tmp_path, 5))
            await admin.abandon()
            assert not server.paused
        assert await admin.label() == "abc-4"
        assert server.log.of("finished")[0]["finish"] == "stop"


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/update_weight_version", "/resume", "/weight_info"])
async def test_a_call_that_is_never_answered_ends_at_its_limit_and_the_engine_unpaused(tmp_path, path):
    hang = Rule(match={"path": path}, after=0, nth=(1,), do=Reply(hang=True))
    async with served("vllm", hang, request_timeout_seconds=4.0) as (server, admin):
        weights = checkpoint(tmp_path, 4)
        with pytest.raises(EngineFailed, match=r"not answered within 4 s"):
            await sync(admin, weights)
        await admin.abandon()
        assert not server.paused
        await sync(admin, weights)


# --------------------------------------------------------------------------------------------------------------------------------- the rest


async def test_tokens_of_probes_are_not_the_runs(tmp_path):
    async with served("vllm") as (server, admin):
        await sync(admin, checkpoint(tmp_path, 4))
        assert server.generated == 17
        assert await admin.sampled_tokens() == 0
        await generate(server, "vllm", 4)
        assert await admin.sampled_tokens() == server.generated - 17


async def test_a_checkpoint_is_held_while_it_is_served(tmp_path, kind):
    async with served(kind) as (_, admin):
        four, five = checkpoint(tmp_path, 4), checkpoint(tmp_path, 5)
        await sync(admin, four)
        assert is_held(Path(four.directory))
        await sync(admin, five)
        assert (is_held(Path(four.directory)), is_held(Path(five.directory))) == (False, True)
        await admin.close()
        assert not is_held(Path(five.directory))


async def test_an_engine_sleeps_and_wakes_and_is_given_its_weights_anew(tmp_path, kind):
    async with served(kind) as (server, admin):
        weights = checkpoint(tmp_path, 4)
        await sync(admin, weights)
        await admin.sleep()
        assert server.weights.asleep
        await admin.wake()
        await sync(admin, weights)
        await generate(server, kind, 4)
        assert server.log.of("finished")[-1]["loaded"][0][0] == 4


async def test_what_it_is_called(kind):
    async with served(kind, script=EngineScript(version="1.2.3")) as (_, admin):
        assert await admin.software() == f"{kind} 1.2.3"
        assert admin.kind == kind
    assert await admin.software() == "unknown"


async def test_a_checkpoint_without_offers_is_not_changed_on_its_way(tmp_path, kind):
    async with served(kind, weight_transfer="delta") as (server, admin):
        await sync(admin, replace(checkpoint(tmp_path, 4), offers={}))
        assert [entry["directory"] for entry in server.log.of("loaded")] == [str(tmp_path / "4")]
