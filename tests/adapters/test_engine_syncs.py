"""Weight syncs of both kinds of engine, over real HTTP: each mode, checkpoints that do not fit, labels that lie, other weights."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from held_ports import held_ports
from safetensors.numpy import save_file

from headway.adapters.engines import admin_of
from headway.adapters.engines.calls import CallRefused
from headway.adapters.engines.http import HttpPool
from headway.errors import EngineFailed, StorageError
from headway.formats.hold import is_held
from headway.formats.probe import Probe, write_probe
from headway.settings import EngineSection
from headway.testing import EngineScript, FakeEngine, Reply, Rule
from headway.types import Checkpoint, EngineAddress, SamplingParams

KINDS = ("vllm", "sglang")
MODES: dict[str, Any] = {
    "recompute": {"weight_sync": "in_flight"},
    "keep": {"weight_sync": "in_flight", "recompute_kv": False},
    "abort": {"weight_sync": "abort_resume"},
    "wait": {"weight_sync": "wait"},
}
LOADS = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}
PROMPT = [10, 11, 12, 13, 14, 15, 16, 17, 18]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def checkpoint(directory: Path, version: int, *, probe: bool = True, **tensors) -> Checkpoint:
    path = directory / f"{version}"
    path.mkdir()
    numbers: dict[str, Any] = {"version": np.array([version], np.int64), "weight": np.full((2, 3), version, np.float32)}
    save_file(numbers | tensors, path / "model.safetensors")
    (path / "manifest.json").write_text("{}")
    if probe:
        chances = np.random.default_rng(version).dirichlet(np.ones(100))
        write_probe(path, Probe(tuple(range(3, 12)), np.log(chances).astype(np.float32)))
    return Checkpoint(version, f"abc-{version}", str(path))


@asynccontextmanager
async def served(kind, *rules, default=None, script=EngineScript(), sampling=SamplingParams(), model="", **settings):  # noqa: B008
    """An engine of a kind, at a port that is its own when it is down as well, and its administrative client."""
    speaking = msgspec.structs.replace(script, speaks=kind)
    with held_ports() as port:
        async with FakeEngine(rules, script=speaking, default=default, port=port) as server:
            section = EngineSection(**{"request_timeout_seconds": 60.0, **settings})
            admin = admin_of("engine-0", EngineAddress(server.url, kind), section, sampling=sampling, model=model)
            yield server, admin
            await admin.close()


async def sync(admin, weights: Checkpoint) -> None:
    await admin.prepare(weights)
    await admin.transfer(weights)
    await admin.commit(weights)


async def generate(server: FakeEngine, kind: str, tokens: int) -> None:
    http = HttpPool()
    body: dict[str, Any]
    if kind == "vllm":
        body = {"request_id": "train-1-0-0-1", "token_ids": PROMPT, "sampling_params": {"max_tokens": tokens, "logprobs": 0}}
        await http.request("POST", server.url + "/inference/v1/generate", msgspec.json.encode(body))
    else:
        body = {"rid": "train-1-0-0-1", "input_ids": PROMPT, "sampling_params": {"max_new_tokens": tokens}, "return_logprob": True}
        await http.request("POST", server.url + "/generate", msgspec.json.encode(body))
    await http.close()


LONG = 4000  # tokens: more than are ever written


@asynccontextmanager
async def in_flight(server: FakeEngine, kind: str):
    """A generation that has written a few tokens and goes on as long as the block does, or until `end_soon`, which it yields."""
    running = asyncio.create_task(generate(server, kind, LONG))
    while not any(generation.written.ids for generation in server._live):  # nobody tells of a single token
        assert not running.done()
        await asyncio.sleep(0.002)

    def end_soon():
        for generation in server._live:
            del generation._ids[len(generation.written.ids) + 3 :]

    yield end_soon
    end_soon()
    await running


SLOW = Rule(match={"purpose": "train"}, do=Reply(tokens=LONG, token_seconds=0.01))


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


# ------------------------------------------------------------------------------------------------------------- what never reaches an engine


def bad_missing(good: Checkpoint) -> str:
    (Path(good.directory) / "model.safetensors").unlink()
    return "holds no"


def bad_truncated(good: Checkpoint) -> str:
    file = Path(good.directory) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    return "was cut"


def bad_lacking(good: Checkpoint) -> str:
    save_file({"version": np.array([5], np.int64)}, Path(good.directory) / "model.safetensors")
    return "tensor weight is missing"


def bad_shape(good: Checkpoint) -> str:
    tensors: dict[str, Any] = {"version": np.array([5], np.int64), "weight": np.zeros((3, 2), np.float32)}
    save_file(tensors, Path(good.directory) / "model.safetensors")
    return "tensor weight is"


def bad_type(good: Checkpoint) -> str:
    tensors: dict[str, Any] = {"version": np.array([5], np.int64), "weight": np.zeros((2, 3), np.float16)}
    save_file(tensors, Path(good.directory) / "model.safetensors")
    return "tensor weight is"


BAD = [bad_missing, bad_truncated, bad_lacking, bad_shape, bad_type]


@pytest.mark.parametrize("spoil", BAD)
async def test_a_bad_checkpoint_is_refused_before_the_engine_hears_of_it_and_the_engine_serves_on(tmp_path, kind, spoil):
    async with served(kind) as (server, admin):
        await sync(admin, checkpoint(tmp_path, 4))
        bad = checkpoint(tmp_path, 5)
        says, asked = spoil(bad), len(server.log.of("asked"))
        with pytest.raises(StorageError, match=says):
            await admin.prepare(bad)
        assert len(server.log.of("asked")) == asked
        assert not server.paused
        await generate(server, kind, 4)
        assert [label for label, *_ in server.log.of("finished")[0]["labels"]] == ["abc-4"]
        await sync(admin, checkpoint(tmp_path, 6))
        assert await admin.label() == "abc-6"


@pytest.mark.parametrize("spoil", [bad_missing, bad_truncated, bad_lacking, bad_shape])
async def test_the_first_checkpoint_is_held_against_the_model_that_the_run_starts_from(tmp_path, kind, spoil):
    model = checkpoint(tmp_path, 0, probe=False)
    (Path(model.directory) / "manifest.json").unlink()
    async with served(kind, model=model.directory) as (server, admin):
        bad = checkpoint(tmp_path, 5)
        with pytest.raises(StorageError, match=spoil(bad)):
            await admin.prepare(bad)
        assert not server.log.of("asked")
        await sync(admin, checkpoint(tmp_path, 6, weight=np.zeros((2, 3), np.float16)))  # a trainer's own type: engines convert


# --------------------------------------------------------------------------------------------------------------------- what is not believed


@pytest.mark.parametrize(
    ("kind", "lie"),
    [
        ("vllm", Rule(match={"path": "/update_weight_version", "version": "abc-5"}, do=Reply(json={"success": True}))),
        ("sglang", Rule(match={"path": "/update_weights_from_disk", "version": "abc-5"}, do=Reply(json={"success": True}))),
    ],
)
async def test_an_engine_that_keeps_the_old_label_is_not_believed(tmp_path, kind, lie):
    async with served(kind, lie) as (server, admin):
        await sync(admin, checkpoint(tmp_path, 4))
        with pytest.raises(EngineFailed, match='says it serves "abc-4" after it was given "abc-5"'):
            await sync(admin, checkpoint(tmp_path, 5))
        await admin.abandon()
        assert not server.paused


async def test_an_engine_that_has_the_label_and_other_weights_is_found_out_by_its_probe(tmp_path):
    lie = Rule(match={"path": "/collective_rpc", "weights": "5"}, do=Reply(json={"results": [None]}))
    async with served("vllm", lie) as (server, admin):
        await sync(admin, checkpoint(tmp_path, 4))
        with pytest.raises(EngineFailed, match=r"serves other weights than .*/5: after the probe's prompt, token \d+ has log-probability"):
            await sync(admin, checkpoint(tmp_path, 5))
        assert server.weights.label == "abc-5"
        await admin.abandon()
        assert (await admin.label(), server.paused) == ("unknown", False), "or it would be taken for one that has been loaded"
        await sync(admin, checkpoint(tmp_path, 6))


async def test_without_a_probe_in_the_checkpoint_the_label_has_to_do(tmp_path, kind):
    async with served(kind) as (server, admin):
        await sync(admin, checkpoint(tmp_path, 4, probe=False))
        await sync(admin, checkpoint(tmp_path, 5, probe=False))
        assert len(server.log.of("probed")) == 2, "by which its log-probabilities were judged"


@pytest.mark.parametrize(("kind", "flag"), [("vllm", "--logprobs-mode processed_logprobs"), ("sglang", "SGLANG_RETURN_ORIGINAL_LOGPROB")])
async def test_raw_log_probabilities_are_refused_with_the_flag_to_set(tmp_path, kind, flag):
    async with served(kind, default=Reply(logprobs="raw")) as (server, admin):
        with pytest.raises(EngineFailed, match=flag):
            await sync(admin, checkpoint(tmp_path, 4))
        await admin.abandon()
        assert not server.paused


async def test_an_engine_is_heard_again_after_a_restart(tmp_path):
    async with served("vllm") as (server, admin):
        weights = checkpoint(tmp_path, 4)
        await sync(admin, weights)
        await server.kill()
        server.default = Reply(logprobs="raw")  # started anew, and without the flag
        await server.start()
        assert await admin.label() == "default"
        with pytest.raises(EngineFailed, match="processed_logprobs"):
            await sync(admin, weights)


async def test_an_engine_that_forgets_what_top_k_cut_off_is_refused_where_that_is_asked_for(tmp_path):
    async with served("sglang", sampling=SamplingParams(top_k=5)) as (_, admin):
        with pytest.raises(EngineFailed, match=r"set rollout\.top_k = 0"):
            await sync(admin, checkpoint(tmp_path, 4))


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (Reply(status=400, text="no such id"), "answered 400: no such id; so it cannot be checked"),
        (Reply(logprobs="fewer"), "no usable answer"),
        (Reply(logprobs="absent"), "no usable answer"),
        (Reply(ids=()), "sampled nothing"),
        (Reply(text="<html>"), "no usable answer"),
    ],
)
async def test_an_engine_that_cannot_be_probed_fails_by_name(tmp_path, kind, reply, says):
    async with served(kind, Rule(match={"purpose": "probe"}, do=reply)) as (_, admin):
        with pytest.raises(EngineFailed, match=says):
            await sync(admin, checkpoint(tmp_path, 4))


async def test_a_vllm_without_the_generate_route_is_probed_by_completions(tmp_path):
    async with served("vllm", script=EngineScript(generate_route=False)) as (server, admin):
        await sync(admin, checkpoint(tmp_path, 4))
        assert {entry["path"] for entry in server.log.of("probed")} == {"/v1/completions"}


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
