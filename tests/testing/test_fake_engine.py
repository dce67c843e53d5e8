"""The fake engine, met by the very clients that meet real ones."""

import asyncio
import json

import pytest

from headway.adapters.engines.client import EngineClient
from headway.adapters.engines.generation import ContextExceeded, GenerationFailed
from headway.adapters.engines.http import ConnectionFailed, HttpPool
from headway.adapters.engines.vllm.admin import VllmEngine
from headway.errors import EngineFailed
from headway.settings import EngineSection
from headway.testing import EngineProcess, EngineScript, FakeEngine, Reply, Rule, engine_thread, write_tiny_model
from headway.testing.engine.script import logprob_of
from headway.types import Checkpoint, EngineAddress, SamplingParams

SAMPLING = SamplingParams(max_tokens=8)


@pytest.fixture
async def client():
    client = EngineClient("run", retries=10)
    yield client
    await client.close()


@pytest.fixture
async def pool():
    pool = HttpPool()
    yield pool
    await pool.close()


def engine_of(*rules, **script):
    return FakeEngine(rules, script=EngineScript(label="run-3", **script))


async def generate(client, engine, *, seed=1, prompt=(1, 5, 6), max_tokens=8, name="train-4-2-1-1"):
    return await client.generate(EngineAddress(engine.url), list(prompt), SAMPLING, seed=seed, max_tokens=max_tokens, request_id=name)


def admin_of(engine, name="engine-0", **settings):
    return VllmEngine(name, engine.url, EngineSection(urls=(engine.url,), launch="none", **settings))


def checkpoint(directory, version):
    return Checkpoint(version, f"run-{version}", str(write_tiny_model(directory / f"{version:08d}", version=version)))


async def test_the_same_seed_brings_the_same_tokens_and_another_seed_others(client):
    async with engine_of() as engine:
        first, again, other = [await generate(client, engine, seed=seed) for seed in (7, 7, 8)]
    assert first == again
    assert first.token_ids != other.token_ids
    assert first.logprobs == [logprob_of(token, index) for index, token in enumerate(first.token_ids)]
    assert first.spans == [(0, 3)]
    assert first.finish == "stop"


async def test_a_request_is_logged_by_the_names_that_headway_gives_it(client):
    async with engine_of() as engine:
        answer = await generate(client, engine)
        [arrived], [finished] = engine.log.of("arrived"), engine.log.of("finished")
    names = {name: arrived[name] for name in ("purpose", "group", "member", "attempt", "turn", "session")}
    assert names == {"purpose": "train", "group": 4, "member": 2, "attempt": 1, "turn": 1, "session": "train-4-2-1"}
    assert arrived["prompt"] == [1, 5, 6]
    assert finished["ids"] == answer.token_ids
    assert finished["labels"] == [("run-3", 0, len(answer.token_ids))]
    assert finished["disconnected"] is False


@pytest.mark.parametrize("lie", ["fewer", "more", "none", "absent"])
async def test_a_lie_about_logprobs_is_a_lie(client, lie):
    async with engine_of(Rule(do=Reply(logprobs=lie))) as engine:
        with pytest.raises(GenerationFailed, match="logprobs for") as failure:
            await generate(client, engine)
    assert failure.value.cause == "length_mismatch"


async def test_a_wrong_label_absent_versions_and_an_empty_completion_come_as_scripted(client):
    rules = Rule(nth=(1,), do=Reply(label="other-3")), Rule(nth=(1,), do=Reply(ids=()))
    async with engine_of(*rules) as engine:
        with pytest.raises(GenerationFailed, match="other-3"):
            await generate(client, engine)
        with pytest.raises(GenerationFailed, match="without a token"):
            await generate(client, engine)
        await generate(client, engine)


async def test_an_abort_with_k_tokens_is_continued_from_there(client):
    async with engine_of(Rule(nth=(1,), do=Reply(ids=(20, 21, 22), finish="abort"))) as engine:
        answer = await generate(client, engine)
        first, second = engine.log.of("arrived")
    assert answer.token_ids[:3] == [20, 21, 22]
    assert second["prompt"] == [1, 5, 6, 20, 21, 22]
    assert (first["max_tokens"], second["max_tokens"]) == (8, 5)


async def test_refusals_come_with_status_body_type_and_headers(pool):
    rules = (
        Rule(nth=(1,), do=Reply(status=422, text="no such thing")),
        Rule(nth=(1,), do=Reply(status=404, text="<html>", content_type="text/html")),
        Rule(nth=(1,), do=Reply(status=429, json={}, headers={"Retry-After": "7"})),
    )
    async with engine_of(*rules) as engine:
        body = json.dumps({"token_ids": [1], "sampling_params": {}}).encode()
        answers = [await pool.request("POST", f"{engine.url}/inference/v1/generate", body) for _ in range(3)]
    assert [(each.status, each.body, each.retry_after) for each in answers] == [
        (422, b"no such thing", ""),
        (404, b"<html>", ""),
        (429, b"{}", "7"),
    ]


async def test_busy_answers_are_for_generations_only_unless_a_rule_names_a_path(client):
    async with engine_of(Rule(nth=(1, 2), do=Reply(status=503))) as engine:
        assert await admin_of(engine).label() == "run-3"
        await generate(client, engine)
        assert len(engine.log.of("arrived")) == 3


async def test_a_prompt_as_long_as_the_context_is_refused_as_vllm_does(client):
    async with engine_of(context=3) as engine:
        with pytest.raises(ContextExceeded):
            await generate(client, engine)


async def test_a_client_that_leaves_frees_its_request(client):
    async with engine_of(Rule(do=Reply(hang=True))) as engine:
        waiting = asyncio.create_task(generate(client, engine))
        await engine.until(lambda: engine.running == 1)
        waiting.cancel()
        await engine.until(lambda: engine.running == 0)
        assert engine.log.of("finished")[0]["disconnected"] is True


async def test_a_cut_connection_is_a_connection_that_breaks(pool):
    async with engine_of(Rule(match={"path": "/health"}, do=Reply(cut=True))) as engine:
        with pytest.raises(ConnectionFailed):
            await pool.request("GET", f"{engine.url}/health")


async def test_an_answer_that_trickles_arrives_whole(client):
    async with engine_of(Rule(do=Reply(trickle_seconds=0.001))) as engine:
        assert (await generate(client, engine)).token_ids


async def test_a_weight_sync_is_pause_load_label_resume_and_new_tokens_are_stamped_anew(client, tmp_path):
    async with engine_of() as engine:
        admin = admin_of(engine)
        new = checkpoint(tmp_path, 4)
        await admin.prepare(new)
        assert engine.paused
        await admin.transfer(new)
        await admin.commit(new)
        calls = [entry["path"] for entry in engine.log.of("asked")]
        answer = await generate(client, engine)
        await admin.close()
        [loaded] = engine.log.of("loaded")
        [finished] = engine.log.of("finished")
    assert calls == ["/pause", "/collective_rpc", "/update_weight_version", "/resume", "/weight_info"]
    assert loaded["version"] == 4
    assert answer.spans == [(0, 4)]
    assert finished["loaded"] == [(4, 0, len(answer.token_ids))]


async def test_a_generation_across_a_switch_has_a_span_for_each_version(client, tmp_path):
    async with engine_of(Rule(do=Reply(ids=(10, 11, 12, 13) * 75, token_seconds=0.01))) as engine:
        admin, new = admin_of(engine), checkpoint(tmp_path, 4)
        writing = asyncio.create_task(generate(client, engine, max_tokens=300))
        while not (writing.done() or any(len(live.written.ids) >= 3 for live in engine._live)):  # noqa: ASYNC110 -- nobody tells of a single token
            await asyncio.sleep(0.001)
        await admin.prepare(new)
        await admin.transfer(new)
        await admin.commit(new)
        answer = await writing
        await admin.close()
    assert [version for _, version in answer.spans] == [3, 4]
    assert 3 <= answer.spans[1][0] < 300


async def test_a_pause_that_waits_lets_what_runs_finish_and_holds_what_is_new(client):
    async with engine_of(Rule(do=Reply(tokens=4, token_seconds=0.005))) as engine:
        running = asyncio.create_task(generate(client, engine))
        await engine.until(lambda: bool(engine._live))
        pool = HttpPool()
        await pool.request("POST", f"{engine.url}/pause?mode=wait")
        assert len((await running).token_ids) == 4
        held = asyncio.create_task(generate(client, engine))
        await engine.until(lambda: len(engine.log.of("arrived")) == 2)
        assert not held.done()
        await pool.request("POST", f"{engine.url}/resume")
        await held
        await pool.close()


async def test_a_pause_that_aborts_ends_what_runs_with_what_it_has(pool):
    async with engine_of(Rule(do=Reply(ids=(9, 9, 9), token_seconds=60))) as engine:
        body = json.dumps({"token_ids": [1], "request_id": "r", "sampling_params": {"logprobs": 0}}).encode()
        asked = asyncio.create_task(pool.request("POST", f"{engine.url}/inference/v1/generate", body))
        await engine.until(lambda: bool(engine._live))
        await pool.request("POST", f"{engine.url}/pause?mode=abort")
        choice = json.loads((await asked).body)["choices"][0]
    assert (choice["finish_reason"], choice["token_ids"]) == ("abort", [])


async def test_a_load_that_fails_leaves_the_old_weights(client, tmp_path):
    async with engine_of() as engine:
        pool = HttpPool()
        body = json.dumps({"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "none")}}).encode()
        assert (await pool.request("POST", f"{engine.url}/collective_rpc", body)).status == 500
        await pool.close()
        assert (await generate(client, engine)).spans == [(0, 3)]
        assert engine.weights.loaded is None


async def test_an_answer_may_lie_about_what_was_done(pool):
    rules = (
        Rule(match={"path": "/update_weight_version"}, do=Reply(json={"success": False}, effect=True)),
        Rule(match={"path": "/resume"}, nth=(1,), do=Reply(json={"status": "resumed"})),
    )
    async with engine_of(*rules) as engine:
        label = json.dumps({"new_version": "run-9"}).encode()
        answer = await pool.request("POST", f"{engine.url}/update_weight_version", label)
        await pool.request("POST", f"{engine.url}/pause?mode=keep")
        await pool.request("POST", f"{engine.url}/resume")
        assert json.loads(answer.body) == {"success": False}
        assert engine.weights.label == "run-9"
        assert engine.paused


async def test_the_prefix_cache_knows_which_weights_filled_it(client, tmp_path):
    async with engine_of(cache_block=2) as engine:
        await generate(client, engine, prompt=range(10, 18))
        engine.weights.load(str(write_tiny_model(tmp_path / "v", version=5)))
        await generate(client, engine, prompt=range(10, 18))
        engine.weights.clear_cache()
        await generate(client, engine, prompt=range(10, 18))
        hits = [(entry["cache_hits"], entry["stale_hits"]) for entry in engine.log.of("finished")]
    assert hits == [(0, 0), (4, 4), (0, 0)]


async def test_sglangs_calls_generate_switch_pause_and_flush(pool, tmp_path):
    async def call(engine, path, **body):
        answer = await pool.request("POST", f"{engine.url}{path}", json.dumps(body).encode())
        return answer.status, json.loads(answer.body or b"null")

    async with engine_of() as engine:
        sampling = {"max_new_tokens": 4, "sampling_seed": 5}
        status, answer = await call(
            engine, "/generate", input_ids=[1, 5], rid="train-0-1-1-1", sampling_params=sampling, return_logprob=True
        )
        meta = answer["meta_info"]
        assert status == 200
        assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
        assert meta["weight_version"] == "run-3"
        assert (await call(engine, "/pause_generation", mode="retract"))[0] == 200
        assert engine.paused
        new = str(write_tiny_model(tmp_path / "00000004", version=4))
        assert (await call(engine, "/update_weights_from_disk", model_path=new, weight_version="run-4"))[1]["success"] is True
        assert (await call(engine, "/continue_generation"))[0] == 200
        assert (await call(engine, "/update_weights_from_disk", model_path=str(tmp_path / "none"), weight_version="run-5"))[0] == 400
        assert (await call(engine, "/flush_cache"))[1] == {"success": True}
        assert json.loads((await pool.request("GET", f"{engine.url}/get_model_info")).body)["weight_version"] == "run-4"


async def test_a_killed_engine_breaks_its_connections_and_comes_back_without_its_weights(client):
    async with engine_of(Rule(nth=(1,), do=Reply(hang=True))) as engine:
        address = engine.url
        waiting = asyncio.create_task(generate(client, engine))
        await engine.until(lambda: engine.running == 1)
        engine.weights.label = "run-8"
        await engine.kill()
        await engine.start()
        assert (await waiting).spans == [(0, 3)]
        assert engine.url == address == f"http://{engine.host}:{engine.port}"


async def test_an_engine_that_never_answers_runs_into_the_limit_of_the_call():
    async with engine_of(Rule(match={"path": "/pause"}, do=Reply(hang=True))) as engine:
        admin = VllmEngine("engine-0", engine.url, EngineSection(urls=(engine.url,), launch="none", request_timeout_seconds=0.05))
        with pytest.raises(EngineFailed, match="was not answered within"):
            await admin._calls.call("POST", "/pause?mode=keep")
        await admin.close()


def test_as_a_process_it_dies_by_its_script_and_its_log_survives(tmp_path):
    script = EngineScript(rules=(Rule(do=Reply(kill=True)),))

    async def ask(url):
        client = EngineClient("run", retries=0)
        try:
            await client.generate(EngineAddress(url), [1], SAMPLING, seed=1, max_tokens=1, request_id="train-0-0-1-1")
        except GenerationFailed as failure:
            return str(failure)
        finally:
            await client.close()

    with EngineProcess(tmp_path, script=script) as engine:
        asyncio.run(ask(engine.url))
        assert engine.process.wait(120) == -9
        engine.kill()
        engine.start()
        engine.set_rules([])
        assert "default" in asyncio.run(ask(engine.url))
        kinds = [entry["what"] for entry in engine.entries()]
    assert kinds[:2] == ["served", "asked"]
    assert kinds.count("served") == 2
    assert "killed" in kinds


def test_on_a_thread_it_is_at_hand_for_tests_without_a_loop():
    with engine_thread(label="run-1") as served:
        pool = HttpPool()

        async def ask():
            answer = await pool.request("GET", f"{served.url}/weight_info")
            await pool.close()
            return answer

        assert json.loads(asyncio.run(ask()).body) == {"weight_version": "run-1"}
        assert served.entries()[-1]["path"] == "/weight_info"
