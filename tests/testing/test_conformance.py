"""The conformance suite, against fakes that are honest and fakes that lie in one thing each; a real server where one is named."""

import asyncio
import json
import os
from typing import Any

import msgspec
import pytest

from headway.adapters.engines.http import HttpPool
from headway.testing import EngineScript, FakeEngine, Reply, Rule, write_tiny_model
from headway.testing.conformance import CHECKS, ConformanceSettings, run_conformance
from headway.testing.conformance.bench import Bench
from headway.testing.conformance.server import Server
from headway.testing.conformance.suite import judged
from headway.testing.conformance.verdicts import Missed
from headway.types import EngineAddress

WEIGHTS = {"sync-in-flight", "sync-abort-resume", "sync-wait", "fresh-cache", "bad-checkpoints"}
SETTINGS = ConformanceSettings(tokens=48, concurrency=16, in_flight=4, limit_seconds=60.0, freed_seconds=8.0)


@pytest.fixture
def checkpoints(tmp_path):
    """The served checkpoint and another one, as `run_conformance` takes them."""
    return {"model": write_tiny_model(tmp_path / "a", version=0), "other": write_tiny_model(tmp_path / "b", version=1)}


@pytest.fixture
def adapter(tmp_path):
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(b"")
    return directory


def engine_of(*rules, checkpoints=None, **script):
    model: dict[str, Any] = {"model": str(checkpoints["model"])} if checkpoints else {}
    return FakeEngine(rules, script=EngineScript(label="found-7", token_seconds=0.003, context=256, **model, **script))


async def asked(engine, path, body):
    pool = HttpPool()
    assert (await pool.request("POST", engine.url + path, json.dumps(body).encode())).status == 200
    await pool.close()


async def outcomes_of(engine, kind="vllm", **options):
    verdicts = await run_conformance(EngineAddress(engine.url, kind), settings=SETTINGS, **options)
    assert [verdict.name for verdict in verdicts] == list(CHECKS)
    return {verdict.name: (verdict.outcome, verdict.told) for verdict in verdicts}


def named(outcomes, outcome):
    return {name for name, (found, _) in outcomes.items() if found == outcome}


@pytest.mark.parametrize("speaks", ["vllm", "sglang"])
async def test_an_honest_engine_passes_every_check_and_is_left_as_it_was_found(speaks, checkpoints, adapter):
    async with engine_of(checkpoints=checkpoints, speaks=speaks) as engine:
        mark = engine.weights.mark
        outcomes = await outcomes_of(engine, speaks, adapter=adapter, **checkpoints)
        assert named(outcomes, "passed") == set(CHECKS), outcomes
        assert (engine.weights.label, engine.weights.mark, engine.paused) == ("found-7", mark, False)
        assert engine.adapters.loaded == {}


async def test_an_engine_with_completions_only_passes_what_it_can_be_asked(checkpoints):
    async with engine_of(checkpoints=checkpoints, speaks="vllm", generate_route=False) as engine:
        outcomes = await outcomes_of(engine, **checkpoints)
    assert named(outcomes, "failed") == set(), outcomes
    assert named(outcomes, "skipped") == {"aborted", "adapters"}


async def test_without_checkpoints_no_weights_are_touched():
    async with engine_of() as engine:
        outcomes = await outcomes_of(engine)
        assert named(outcomes, "skipped") == {*WEIGHTS, "adapters"}
        assert named(outcomes, "failed") == set()
        assert engine.log.of("loaded") == []
        assert not {entry["path"] for entry in engine.log.of("asked")} & {"/update_weight_version", "/collective_rpc"}


def of(check, **reply):
    """Return a rule for the generations of a check."""
    return Rule(match={"request_id": f"conformance-{check}-*"}, do=Reply(**reply))


LIES = {
    "health": [Rule(match={"path": "/health"}, do=Reply(status=503))],
    "label": [Rule(match={"path": "/weight_info"}, times=3, do=Reply(status=500))],
    "exact": [of("exact", logprobs="fewer")],
    "logprobs": [of("logprobs", logprobs="raw")],
    "max-tokens": [of("max-tokens", ids=tuple(range(10, 30)))],
    # Whichever id is asked for by chance: it is not the last one, or it stood there before.
    "stop-ids": [Rule(match={"request_id": "conformance-stop-ids-*"}, after=1, do=Reply(ids=(11, 12, 11)))],
    "end-included": [
        Rule(match={"request_id": "conformance-end-included-*", "seed": seed}, do=Reply(ids=(11 + seed, 12 + seed), finish="stop"))
        for seed in range(16)
    ],
    "seeds": [of("seeds", ids=(11, 12, 13, 14))],
    "too-long": [of("too-long", status=500, json={"error": "CUDA out of memory"})],
    "no-such-id": [Rule(match={"request_id": "conformance-no-such-id-*"}, times=1, do=Reply(status=500, text="assert id < vocabulary"))],
    "concurrency": [Rule(match={"request_id": "conformance-concurrency-*"}, every=10, do=Reply(status=503))],
    "cancelled": [of("cancelled", deaf=True, tokens=240, token_seconds=0.25)],
    "aborted": [Rule(match={"path": "/inference/v1/abort_requests"}, do=Reply(json={}))],
    "paused": [Rule(match={"path": "/pause"}, do=Reply(json={"status": "paused"}))],
}


@pytest.mark.parametrize("check", LIES)
async def test_a_lie_is_found_by_its_check_and_by_no_other(check):
    async with engine_of(*LIES[check]) as engine:
        outcomes = await outcomes_of(engine)
    assert named(outcomes, "failed") == {check}, outcomes


WEIGHT_LIES = {
    "sync-in-flight": ({}, [of("sync-in-flight", label="conformance-0")]),
    "sync-abort-resume": ({}, [of("sync-abort-resume", label="conformance-0")]),
    "sync-wait": ({}, [Rule(match={"path": "/pause", "mode": "wait"}, do=Reply(json={"status": "paused"}))]),
    "fresh-cache": ({"pause_clears": False, "cache_block": 32}, []),
    "bad-checkpoints": ({}, [of("bad-checkpoints", status=500)]),
    "restored": ({}, [Rule(match={"path": "/update_weight_version", "version": "found-7"}, do=Reply(json={"success": True}))]),
}


@pytest.mark.parametrize("check", WEIGHT_LIES)
async def test_a_lie_about_weights_is_found_by_its_check_and_by_no_other(check, checkpoints):
    script, rules = WEIGHT_LIES[check]
    async with engine_of(*rules, checkpoints=checkpoints, **script) as engine:
        outcomes = await outcomes_of(engine, **checkpoints)
    assert named(outcomes, "failed") == {check}, outcomes


async def test_a_pause_that_lets_what_is_under_way_go_on_is_found():
    async with engine_of(pause_holds=False) as engine:
        settings = msgspec.structs.replace(SETTINGS, tokens=200)
        verdicts = {each.name: each for each in await run_conformance(EngineAddress(engine.url, "vllm"), settings=settings)}
    assert verdicts["paused"].outcome == "failed"
    assert "went on during it" in verdicts["paused"].told


async def test_a_sync_that_no_generation_meets_proves_nothing(checkpoints):
    script = EngineScript(label="found-7", context=256, model=str(checkpoints["model"]))
    async with FakeEngine(script=script) as engine:
        outcomes = await outcomes_of(engine, **checkpoints)
    for check in ("sync-in-flight", "sync-abort-resume"):
        assert outcomes[check][0] == "skipped"
        assert "has tokens of both versions" in outcomes[check][1]


async def test_an_adapter_that_is_still_there_when_it_is_unloaded_is_found(adapter):
    gone = Rule(match={"path": "/v1/unload_lora_adapter"}, do=Reply(text="Success"))
    async with engine_of(gone) as engine:
        outcomes = await outcomes_of(engine, adapter=adapter)
    assert named(outcomes, "failed") == {"adapters"}, outcomes


async def test_two_checkpoints_that_write_alike_prove_nothing(checkpoints):
    async with engine_of(checkpoints=checkpoints) as engine:
        outcomes = await outcomes_of(engine, model=checkpoints["model"], other=checkpoints["model"])
    assert outcomes["sync-in-flight"] == ("skipped", "the two checkpoints write alike: give others")


async def test_a_model_that_is_not_the_one_that_was_served_is_found_out(checkpoints, tmp_path):
    third = write_tiny_model(tmp_path / "c", version=2)
    async with engine_of(checkpoints={"model": third}) as engine:
        outcomes = await outcomes_of(engine, **checkpoints)
    assert named(outcomes, "failed") == {"restored"}
    assert "it serves those of --model now" in outcomes["restored"][1]


async def test_a_server_that_is_not_there_fails_its_health_and_nothing_else_is_tried():
    async with engine_of() as engine:
        address = engine.url
    verdicts = await run_conformance(EngineAddress(address, "vllm"), settings=SETTINGS)
    assert [verdict.outcome for verdict in verdicts] == ["failed"] + ["skipped"] * (len(CHECKS) - 1)


async def beside_a_server(answer):
    """The verdicts on a server that says `answer` to whatever it is asked, or nothing at all."""

    served = set()

    async def serve(reader, writer):
        task = asyncio.current_task()
        assert task is not None
        served.add(task)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        settings = ConformanceSettings(answer_seconds=30.0 if answer else 3.0, limit_seconds=60.0)
        verdicts = await run_conformance(EngineAddress(f"http://127.0.0.1:{port}", "vllm"), settings=settings)
        await asyncio.wait(served)
        await asyncio.sleep(0)  # a transport closes its socket one turn of the loop later
    return verdicts


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "no inference engine"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "GET /v1/models answered 200: a website, and no inference engine (<html>)"),
        (b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n", "GET /v1/models answered 302: a website, and no inference engine"),
        (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", "asks for a key: HEADWAY_ENGINE_KEY"),
        (b"", "no answer"),
    ],
)
async def test_a_server_that_is_no_engine_lets_nobody_in_or_never_answers_is_asked_nothing_else(answer, told):
    health, *others = await beside_a_server(answer)
    assert health.outcome == "failed"
    assert told in health.told
    assert {verdict.outcome for verdict in others} == {"skipped"}


async def test_a_server_that_answers_anything_with_200_is_told_so_check_by_check():
    verdicts = await beside_a_server(b'HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n"well"')
    failed = {verdict.name: verdict.told for verdict in verdicts if verdict.outcome == "failed"}
    assert "without weight_version" in failed["label"]
    assert "gave an answer without" in failed["exact"]


@pytest.mark.parametrize(("kind", "other"), [("vllm", "sglang"), ("sglang", "vllm")])
async def test_a_server_of_the_other_kind_is_told_so_and_asked_nothing_else(kind, other):
    async with engine_of(speaks=other) as engine:
        outcomes = await outcomes_of(engine, kind)
    assert named(outcomes, "failed") == {"health"}
    assert f"it speaks {other}'s protocol, and was asked in {kind}'s" in outcomes["health"][1]
    assert named(outcomes, "skipped") == set(CHECKS) - {"health"}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_server_that_somebody_has_paused_is_not_waited_for(kind):
    async with engine_of(speaks=kind) as engine:
        await asked(engine, "/pause?mode=keep" if kind == "vllm" else "/pause_generation", {"mode": "retract"})
        outcomes = await outcomes_of(engine, kind)
    assert named(outcomes, "failed") == {"health"}
    assert "it is paused" in outcomes["health"][1]
    assert {outcomes[name] for name in CHECKS if name != "health"} == {("skipped", "the server is paused")}


async def test_whoever_interrupts_it_before_there_was_an_answer_does_not_wait():
    asked = asyncio.Event()

    async def never(reader, writer):
        asked.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(never, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        run = asyncio.create_task(run_conformance(EngineAddress(f"http://127.0.0.1:{port}", "vllm")))
        await asked.wait()
        run.cancel()
        async with asyncio.timeout(20.0):  # the least of its own limits is 30
            with pytest.raises(asyncio.CancelledError):
                await run


async def test_whoever_interrupts_it_twice_is_told_what_he_leaves_behind(checkpoints):
    notes = []

    def note(text):
        notes.append(text)
        if len(notes) == 1:
            asyncio.get_running_loop().call_soon(run.cancel)

    async with engine_of(checkpoints=checkpoints) as engine:
        address = EngineAddress(engine.url, "vllm")
        run = asyncio.create_task(run_conformance(address, settings=SETTINGS, noted=note, **checkpoints))
        await engine.until(lambda: engine.weights.label.startswith("conformance-") and engine.paused, limit=60.0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert "interrupted: the server is left as it was found, within 60 s" in notes[0]
    assert "start it anew" in notes[1]


async def test_whoever_interrupts_it_amid_a_sync_finds_the_server_as_it_was(checkpoints):
    async with engine_of(checkpoints=checkpoints) as engine:
        mark = engine.weights.mark
        run = asyncio.create_task(outcomes_of(engine, **checkpoints))
        await engine.until(lambda: engine.weights.label.startswith("conformance-") and engine.paused, limit=60.0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert (engine.weights.label, engine.weights.mark, engine.paused) == ("found-7", mark, False)


@pytest.mark.skipif("HEADWAY_SGLANG_URL" not in os.environ, reason="HEADWAY_SGLANG_URL names no SGLang server")
async def test_a_real_sglang_fails_nothing():
    verdicts = await run_conformance(EngineAddress(os.environ["HEADWAY_SGLANG_URL"], "sglang"))
    assert [str(verdict) for verdict in verdicts if verdict.outcome == "failed"] == []


@pytest.mark.parametrize(("misses", "outcome", "tried"), [(0, "passed", 1), (1, "passed", 2), (9, "skipped", 3)])
async def test_a_check_whose_generation_was_over_too_soon_is_tried_again_and_not_for_ever(misses, outcome, tried):
    tries = []

    async def check(bench):
        """It is met in flight."""
        tries.append(bench.check)
        if len(tries) <= misses:
            raise Missed("it was over before it could be met")
        return ""

    server = Server(EngineAddress("http://127.0.0.1:1"))
    verdict = await judged(Bench(server, ConformanceSettings()), "met", check)
    await server.close()
    assert (verdict.outcome, tries) == (outcome, ["met"] * tried)
