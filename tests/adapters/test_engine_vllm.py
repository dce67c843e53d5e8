"""The generating and the administrative client of vLLM-speaking engines, against a real HTTP server."""

import asyncio
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from scripted_engine import Break, Hold, Reply, ScriptedEngine, Status, Tokens, logprob, replies

from headway.adapters.engines.vllm import ContextExceeded, Generated, GenerationFailed, VllmClient, VllmEngine
from headway.errors import EngineFailed, StorageError
from headway.formats.hold import is_held
from headway.settings import EngineSection
from headway.types import Checkpoint, SamplingParams

LABEL = "abc-3"


async def generate(engine: ScriptedEngine, client: VllmClient | None = None, *, max_tokens: int = 8, **more) -> Generated:
    own = client or VllmClient("abc", retries=2)
    try:
        return await own.generate(
            engine.url, [5, 6], SamplingParams(temperature=0.7), seed=11, max_tokens=max_tokens, request_id="r", **more
        )
    finally:
        if client is None:
            await own.close()


async def failure(*script: Reply, **more) -> tuple[GenerationFailed, ScriptedEngine]:
    async with ScriptedEngine(replies(*script), label=LABEL) as engine:
        with pytest.raises(GenerationFailed) as caught:
            await generate(engine, **more)
        return caught.value, engine


async def test_ids_logprobs_spans_and_finish_come_back_as_the_engine_gave_them():
    spans = [("abc-3", 0, 2), ("abc-4", 2, 3)]
    async with ScriptedEngine(Tokens([7, 8, 2], spans=spans)) as engine:
        got = await generate(engine, stop_token_ids=[2])
    assert got == Generated([7, 8, 2], [logprob(0), logprob(1), logprob(2)], [(0, 3), (2, 4)], "stop")
    (request,) = engine.requests
    assert request["token_ids"] == [5, 6]
    assert request["sampling_params"] == {"max_tokens": 8, "temperature": 0.7, "seed": 11, "logprobs": 0, "stop_token_ids": [2]}


@pytest.mark.parametrize(
    ("reply", "cause", "retryable"),
    [
        (Tokens([1, 2], logprobs=[-1.0]), "length_mismatch", False),
        (Tokens([1, 2], logprobs=[-1.0, -1.0, -1.0]), "length_mismatch", False),
        (Tokens([1, 2], logprobs=[]), "length_mismatch", False),
        (Tokens([1, 2], without=("logprobs",)), "length_mismatch", False),
        (Tokens([]), "empty_completion", False),
        (Tokens([], finish="length"), "empty_completion", False),
        (Tokens([1, 2], logprobs=[-1.0, math.nan]), "engine_error", True),
        (Tokens([1, 2], logprobs=[-1.0, -math.inf]), "engine_error", True),
        (Tokens([1, 2], finish=None), "engine_error", True),
        (Tokens([1, 2], without=("finish_reason",)), "engine_error", True),
        (Tokens([1, 2], finish="error"), "engine_error", True),
        (Tokens([1] * 9), "engine_error", True),
        (Tokens([1, 2], spans=[("abc-3", 0, 1)]), "engine_error", True),
        (Tokens([1, 2], spans=[("abc-3", 0, 2), ("abc-4", 1, 2)]), "engine_error", True),
        (Tokens([1, 2], spans=[("abc-3", 1, 2)]), "engine_error", True),
        (Tokens([1, 2], spans=[("abc-3", 0, 3)]), "engine_error", True),
        (Tokens([1, 2], spans=[("other-3", 0, 2)]), "engine_error", True),
        (Tokens([1, 2], spans=[("default", 0, 2)]), "engine_error", True),
        (Status(200, "<html>"), "engine_error", True),
        (Status(200, '{"choices": []}'), "engine_error", True),
        (Status(500, "internal"), "engine_error", True),
        (Status(422, "unprocessable"), "engine_error", False),
        (Status(404, "<html>nothing</html>"), "engine_error", False),
    ],
)
async def test_an_unusable_answer_is_refused_by_its_cause_and_asked_for_once(reply, cause, retryable):
    error, engine = await failure(reply)
    assert (error.cause, error.retryable) == (cause, retryable)
    assert len(engine.requests) == 1


async def test_a_refusal_shows_the_start_of_the_body():
    error, _ = await failure(Status(422, "temperature must be\n  a number" + "x" * 5000))
    assert "422" in str(error)
    assert "temperature must be a number" in str(error)
    assert len(str(error)) < 400


async def test_F06_an_aborted_generation_goes_on_with_its_prefix_and_what_is_left_of_the_budget():
    script = replies(Tokens([10, 11], finish="abort"), Tokens([12], finish="abort", spans=[("abc-4", 0, 1)]), Tokens([13, 2]))
    async with ScriptedEngine(script, label="abc-3") as engine:
        got = await generate(engine)
    assert got.token_ids == [10, 11, 12, 13, 2]
    assert got.logprobs == [logprob(0), logprob(1), logprob(0), logprob(0), logprob(1)]
    assert got.spans == [(0, 3), (2, 4), (3, 3)]
    assert got.finish == "stop"
    assert [request["token_ids"] for request in engine.requests] == [[5, 6], [5, 6, 10, 11], [5, 6, 10, 11, 12]]
    assert [request["sampling_params"]["max_tokens"] for request in engine.requests] == [8, 6, 5]
    assert len({request["sampling_params"]["seed"] for request in engine.requests}) == 3
    assert len({request["request_id"] for request in engine.requests}) == 3


async def test_an_engine_that_names_no_versions_gets_the_one_it_served_before_the_request_as_a_stamp():
    nameless = Tokens([1, 2], without=("weight_versions",))
    client = VllmClient("abc", retries=2)
    async with ScriptedEngine(replies(nameless, nameless), label=LABEL) as engine:
        assert (await generate(engine, client)).spans == [(0, 3)]
        engine.label = "abc-4"
        assert (await generate(engine, client)).spans == [(0, 4)]
    await client.close()


@pytest.mark.parametrize("label", ["default", "other-3"])
async def test_only_where_no_version_can_be_known_is_an_answer_without_versions_refused(label):
    async with ScriptedEngine(replies(Tokens([1, 2], without=("weight_versions",))), label=label) as engine:
        with pytest.raises(GenerationFailed, match="not of this run"):
            await generate(engine)


async def test_neighbouring_parts_of_one_version_are_one_span():
    async with ScriptedEngine(replies(Tokens([1, 2], finish="abort"), Tokens([3])), label=LABEL) as engine:
        assert (await generate(engine)).spans == [(0, 3)]


async def test_F06_an_abort_at_the_end_of_the_budget_is_a_finished_generation():
    async with ScriptedEngine(Tokens([1, 2, 3], finish="abort"), label=LABEL) as engine:
        got = await generate(engine, max_tokens=3)
    assert (got.token_ids, got.finish, len(engine.requests)) == ([1, 2, 3], "length", 1)


async def test_F05_an_abort_without_tokens_is_tried_again_and_given_up_in_the_end():
    async with ScriptedEngine(replies(Tokens([], finish="abort"), Tokens([4])), label=LABEL) as engine:
        assert (await generate(engine)).token_ids == [4]
    client = VllmClient("abc", empty_aborts=2)
    error, engine = await failure(Tokens([1], finish="abort"), Tokens([], finish="abort"), client=client)
    await client.close()
    assert (error.cause, error.retryable, error.sampled_tokens) == ("engine_error", False, 1)
    assert len(engine.requests) == 3


async def test_a_busy_engine_is_asked_again_a_bounded_number_of_times_and_by_nobody_else():
    error, engine = await failure(Status(503, "busy"))
    assert len(engine.requests) == 3  # once, and twice more
    assert not error.retryable
    async with ScriptedEngine(replies(Status(429, headers={"Retry-After": "0.05"}), Status(503), Tokens([4])), label=LABEL) as engine:
        assert (await generate(engine)).token_ids == [4]


async def test_retry_after_is_waited_for():
    loop = asyncio.get_running_loop()
    async with ScriptedEngine(replies(Status(429, headers={"Retry-After": "0.4"}), Tokens([4])), label=LABEL) as engine:
        started = loop.time()
        await generate(engine)
        assert loop.time() - started >= 0.4


async def test_a_broken_connection_is_tried_again():
    async with ScriptedEngine(replies(Break(), Tokens([4])), label=LABEL) as engine:
        assert (await generate(engine)).token_ids == [4]
    error, engine = await failure(Break())
    assert len(engine.requests) == 3
    assert (error.cause, error.retryable) == ("engine_error", False)


async def test_an_engine_that_is_not_there_fails_in_bounded_time():
    async with ScriptedEngine(Tokens([1])) as engine:
        pass
    with pytest.raises(GenerationFailed, match="cannot be reached") as caught:
        await generate(engine)
    assert not caught.value.retryable


@pytest.mark.parametrize(
    "body",
    [
        "This model's maximum context length is 1024 tokens. However, you requested 1030 tokens.",
        "The decoder prompt (length 2000) is longer than the maximum model length of 1024.",
        "the prompt has 512 tokens and the context 512: no room for an output token",
    ],
)
async def test_a_prompt_over_the_context_is_told_apart_and_not_tried_again(body):
    async with ScriptedEngine(Status(400, body)) as engine:
        with pytest.raises(ContextExceeded):
            await generate(engine)
    assert len(engine.requests) == 1


async def test_I08_proxies_of_the_environment_are_ignored(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with ScriptedEngine(Tokens([4]), label=LABEL) as engine:
        assert (await generate(engine)).token_ids == [4]


async def test_an_engine_at_an_ipv6_address_is_reached():
    async with ScriptedEngine(Tokens([4]), label=LABEL, host="::1") as engine:
        assert (await generate(engine)).token_ids == [4]


async def test_four_hundred_generations_run_at_once():
    release = asyncio.Event()
    client = VllmClient("abc")
    async with ScriptedEngine(Hold(release), label=LABEL) as engine, asyncio.TaskGroup() as tasks:
        for _ in range(400):
            tasks.create_task(generate(engine, client))
        await engine.until(lambda: engine.running == 400)
        release.set()
    await client.close()
    assert engine.peak == 400


async def test_connections_are_kept_and_used_again():
    client = VllmClient("abc")
    ports = set()

    async with ScriptedEngine(Tokens([4]), label=LABEL) as engine:
        answer = engine._answer

        async def noting_ports(http):
            ports.add(http.transport.get_extra_info("peername")[1])
            return await answer(http)

        engine._runner.server.request_handler = noting_ports
        for _ in range(20):
            await generate(engine, client)
    await client.close()
    assert len(ports) == 1


async def test_a_cancelled_generation_is_seen_by_the_engine():
    async with ScriptedEngine(Hold(asyncio.Event()), label=LABEL) as engine:
        task = asyncio.create_task(generate(engine))
        await engine.until(lambda: engine.running == 1)
        task.cancel()
        await engine.until(lambda: engine.gone == 1)
        with pytest.raises(asyncio.CancelledError):
            await task


# Administration -------------------------------------------------------------------------------------------------------------------------


def checkpoint(directory: Path, version: int = 4, **tensors: np.ndarray) -> Checkpoint:
    directory.mkdir(exist_ok=True)
    save_file(tensors or {"weight": np.zeros((2, 3), np.float32)}, directory / "model.safetensors")
    return Checkpoint(version, f"abc-{version}", str(directory))


async def sync(engine: VllmEngine, weights: Checkpoint) -> None:
    await engine.prepare(weights)
    await engine.transfer(weights)
    await engine.commit(weights)


@pytest.mark.parametrize(
    ("settings", "pause", "resets"),
    [
        ({}, "mode=keep&clear_cache=true", False),
        ({"recompute_kv": False}, "mode=keep&clear_cache=false", True),
        ({"weight_sync": "wait"}, "mode=wait&clear_cache=true", False),
        ({"weight_sync": "abort_resume", "recompute_kv": False}, "mode=abort&clear_cache=true", False),
    ],
)
async def test_a_sync_pauses_loads_labels_and_serves_again(tmp_path, settings, pause, resets):
    weights = checkpoint(tmp_path / "weights")
    async with ScriptedEngine(Tokens([1])) as server:
        engine = VllmEngine("engine-0", server.url, EngineSection(**settings))
        assert await engine.label() == "default"
        await sync(engine, weights)
        assert await engine.label() == "abc-4"
        await engine.close()
    assert server.admin[1:-1] == [
        f"/pause?{pause}",
        f"/collective_rpc reload_weights {weights.directory}",
        "/update_weight_version",
        *(["/reset_prefix_cache"] if resets else []),
        "/resume",
        "/weight_info",
    ]


def damage_nothing_there(file: Path) -> None:
    file.unlink()


def damage_truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])


def damage_header(file: Path) -> None:
    file.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00 not a header   ")


@pytest.mark.parametrize("damage", [damage_nothing_there, damage_truncated, damage_header])
async def test_a_damaged_checkpoint_never_reaches_the_engine(tmp_path, damage):
    weights = checkpoint(tmp_path / "weights")
    damage(tmp_path / "weights" / "model.safetensors")
    async with ScriptedEngine(Tokens([1])) as server:
        engine = VllmEngine("engine-0", server.url, EngineSection())
        with pytest.raises(StorageError, match="safetensors"):
            await engine.prepare(weights)
    assert server.admin == []


async def test_a_checkpoint_that_lacks_a_tensor_of_the_served_one_never_reaches_the_engine(tmp_path):
    whole = checkpoint(tmp_path / "4", a=np.zeros(2, np.float32), b=np.zeros(2, np.float32))
    lacking = checkpoint(tmp_path / "5", 5, a=np.zeros(2, np.float32))
    async with ScriptedEngine(Tokens([1])) as server:
        engine = VllmEngine("engine-0", server.url, EngineSection())
        await sync(engine, whole)
        calls = len(server.admin)
        with pytest.raises(StorageError, match="does not fit the model that engine-0 serves: tensor b is missing"):
            await engine.prepare(lacking)
    assert len(server.admin) == calls


async def test_a_failed_load_is_tried_again_and_then_named_with_its_answer(tmp_path):
    weights = checkpoint(tmp_path / "weights")
    async with ScriptedEngine(Tokens([1])) as server:
        engine = VllmEngine("engine-0", server.url, EngineSection(), retries=1)
        server.refusals["/collective_rpc"] = [Status(500, "no memory")]
        await engine.transfer(weights)
        server.refusals["/collective_rpc"] = [Status(500, "no memory"), Break()]
        with pytest.raises(EngineFailed, match=r"engine-0: POST http://127.*/collective_rpc failed"):
            await engine.transfer(weights)
        server.refusals["/collective_rpc"] = [Status(400, "no such method")]
        with pytest.raises(EngineFailed, match="answered 400: no such method"):
            await engine.transfer(weights)


async def test_an_engine_that_has_the_weights_is_only_made_sure_to_serve_them_and_they_are_held(tmp_path):
    weights = checkpoint(tmp_path / "weights")
    (tmp_path / "weights" / "manifest.json").write_text("{}")
    async with ScriptedEngine(Tokens([1]), label="abc-4") as server:
        server.paused = True  # whoever gave it the weights was killed before he had resumed it
        engine = VllmEngine("engine-0", server.url, EngineSection())
        await engine.commit(weights)
        assert not server.paused
        assert not any("reload_weights" in call for call in server.admin)
        assert is_held(tmp_path / "weights")
        await engine.close()
        assert not is_held(tmp_path / "weights")


async def test_a_cache_that_the_engine_did_not_reset_is_not_taken_for_reset(tmp_path):
    weights = checkpoint(tmp_path / "weights")
    async with ScriptedEngine(Tokens([1])) as server:
        engine = VllmEngine("engine-0", server.url, EngineSection(recompute_kv=False))
        server.refusals["/reset_prefix_cache"] = [Status(200, '{"success": false}')]
        with pytest.raises(EngineFailed, match=r'did not reset its prefix cache: {"success": false}'):
            await sync(engine, weights)
        await sync(engine, weights)
        await engine.close()


async def test_an_engine_that_keeps_its_old_label_is_not_believed(tmp_path):
    weights = checkpoint(tmp_path / "weights")
    async with ScriptedEngine(Tokens([1]), label="abc-3") as server:
        engine = VllmEngine("engine-0", server.url, EngineSection())
        server.refusals["/update_weight_version"] = [Status(200, "{}")]
        with pytest.raises(EngineFailed, match='serves "abc-3"'):
            await sync(engine, weights)


async def test_a_call_that_is_never_answered_is_given_up_at_its_limit(tmp_path):
    weights = checkpoint(tmp_path / "weights")
    async with ScriptedEngine(Tokens([1])) as server:
        engine = VllmEngine("engine-0", server.url, EngineSection(request_timeout_seconds=0.2))
        server.refusals["/pause"] = [Hold(asyncio.Event())]
        with pytest.raises(EngineFailed, match=r"not answered within 0\.2 s"):
            await engine.prepare(weights)


async def test_abandon_resumes_and_never_raises(tmp_path):
    weights = checkpoint(tmp_path / "weights")
    async with ScriptedEngine(Tokens([1])) as server:
        engine = VllmEngine("engine-0", server.url, EngineSection(request_timeout_seconds=0.2))
        await engine.prepare(weights)
        assert server.paused
        await engine.abandon()
        assert not server.paused
        server.refusals["/resume"] = [Hold(asyncio.Event())]
        await engine.abandon()
    await engine.abandon()  # nothing listens any more


@pytest.mark.parametrize(
    ("status", "body", "count"),
    [
        (
            200,
            '# HELP vllm:generation_tokens_total x\n# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total{m="a b"} 12',
            12,
        ),
        (200, 'vllm:generation_tokens_total{engine="0"} 1.5e+06\nvllm:generation_tokens_total{engine="1"} 3.0\n', 1_500_003),
        (200, "vllm:generation_tokens_total 0\nvllm:generation_tokens_total_created 5\n", 0),
        (200, "vllm:prompt_tokens_total 7\n", None),
        (404, "no such path", None),
    ],
)
async def test_the_count_of_sampled_tokens_is_read_from_the_metrics(status, body, count):
    async with ScriptedEngine(Tokens([1])) as server:
        server.refusals["/metrics"] = [Status(status, body)]
        engine = VllmEngine("engine-0", server.url, EngineSection())
        assert await engine.sampled_tokens() == count
        await engine.close()


async def test_an_engine_that_cannot_be_asked_for_its_count_says_so():
    async with ScriptedEngine(Tokens([1])) as server:
        server.refusals["/metrics"] = [Break()] * 5
        engine = VllmEngine("engine-0", server.url, EngineSection())
        with pytest.raises(EngineFailed, match=r"engine-0: .*/metrics cannot be read"):
            await engine.sampled_tokens()
        await engine.close()
