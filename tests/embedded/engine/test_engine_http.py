"""The engine over real HTTP: vLLM's paths, answers and errors."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from headway import __version__  # noqa: E402
from headway.embedded.engine.process import running  # noqa: E402
from headway.embedded.engine.scheduler import Scheduler  # noqa: E402
from headway.embedded.engine.server import MAX_BODY_BYTES  # noqa: E402
from headway.embedded.engine.settings import EngineServerSettings  # noqa: E402
from headway.embedded.engine.thread import ModelThread  # noqa: E402

pytestmark = pytest.mark.torch

CONTEXT = 512


@dataclass
class Client:
    """Calls one engine."""

    session: aiohttp.ClientSession
    url: str
    thread: ModelThread

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body) as response:
            return response.status, (await response.json() if response.content_type == "application/json" else await response.text())

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, (await response.json() if response.content_type == "application/json" else await response.text())

    async def generate(self, token_ids: list[int], request_id: str | None = None, **sampling: Any) -> dict[str, Any]:
        body = {"request_id": request_id, "token_ids": token_ids, "sampling_params": {"logprobs": 0} | sampling}
        status, answer = await self.post("/inference/v1/generate", body)
        assert status == 200, answer
        return answer["choices"][0]

    async def begun(self, *asks: Awaitable[dict[str, Any]]) -> list[asyncio.Future[dict[str, Any]]]:
        """Have generations under way: each that has a row has four tokens, and the model stands still until the next call to it.

        However late that comes, as in a step that takes long: otherwise a generation might be over before anything meets it.
        """
        await self.post("/pause?mode=keep")
        begun: list[asyncio.Future[dict[str, Any]]] = [asyncio.ensure_future(ask) for ask in asks]
        await self.until("num_requests_waiting", lambda waiting: waiting == len(begun))

        def stand(scheduler: Scheduler) -> None:
            scheduler.resume()
            for _ in range(3):  # the first one prefills, and decodes a token like any other
                assert not scheduler.step()
            inbox = self.thread._inbox
            inbox.put(inbox.get())

        self.thread.command(stand)
        return begun

    async def metric(self, name: str) -> float:
        _, text = await self.get("/metrics")
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))

    async def until(self, name: str, holds: Callable[[float], bool]) -> None:
        async with asyncio.timeout(120):
            while not holds(await self.metric(name)):
                pass


@contextlib.asynccontextmanager
async def engine_on(directory: Path, **settings: Any) -> AsyncIterator[Client]:
    chosen = EngineServerSettings(model=directory, device="cpu", threads=1, **{"label": "ab12cd-0"} | settings)
    async with running(chosen) as (url, thread), aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield Client(session, url, thread)


@pytest.fixture
async def engine(tiny_qwen3: Path) -> AsyncIterator[Client]:
    async with engine_on(tiny_qwen3) as client:
        yield client


LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}


async def test_an_answer_holds_ids_logprobs_and_spans_of_every_token(engine: Client):
    status, answer = await engine.post(
        "/inference/v1/generate",
        {"request_id": "r7", "token_ids": [1, 40], "sampling_params": {"max_tokens": 9, "seed": 3, "logprobs": 0, "ignore_eos": True}},
    )
    assert status == 200
    assert answer["request_id"] == "generate-tokens-r7"
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == 9
    assert choice["finish_reason"] == "length"
    assert choice["stop_reason"] is None
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
    assert all(entry["logprob"] < 0 for entry in choice["logprobs"]["content"])
    assert choice["weight_versions"] == [{"version": "ab12cd-0", "start": 0, "end": 9}]


async def test_logprobs_come_only_when_asked_for_and_unknown_keys_are_ignored(engine: Client):
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 2, "min_p": 0.1, "skip_special_tokens": False}, "cache_salt": "x"}
    status, answer = await engine.post("/inference/v1/generate", body)
    assert status == 200
    assert answer["choices"][0]["logprobs"] is None


async def test_end_of_sequence_and_stop_ids_end_a_generation_and_are_part_of_it(engine: Client):
    free = (await engine.generate([1, 30], seed=5, max_tokens=150, ignore_eos=True))["token_ids"]
    at_eos = await engine.generate([1, 30], seed=5, max_tokens=150)
    assert at_eos["token_ids"] == free[: free.index(2) + 1]
    assert (at_eos["finish_reason"], at_eos["stop_reason"]) == ("stop", None)
    stop_id = free[3]
    at_stop = await engine.generate([1, 30], seed=5, max_tokens=150, ignore_eos=True, stop_token_ids=[99, stop_id])
    assert at_stop["token_ids"] == free[: free.index(stop_id) + 1]
    assert (at_stop["finish_reason"], at_stop["stop_reason"]) == ("stop", stop_id)


async def test_max_tokens_is_clamped_to_the_context_and_fills_it_when_left_out(engine: Client):
    prompt = [1] * (CONTEXT - 20)
    assert len((await engine.generate(prompt, max_tokens=10_000, ignore_eos=True))["token_ids"]) == 20
    assert len((await engine.generate(prompt, ignore_eos=True))["token_ids"]) == 20


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"token_ids": [1] * CONTEXT}, "512 tokens and the context 512"),
        ({"token_ids": [1, 57]}, "token id 57 is outside the vocabulary"),
        ({"token_ids": [1, -1]}, "token id -1 is outside the vocabulary"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"token_ids": [1], "stream": True}, "stream"),
        ({"prompt": "text"}, "token_ids"),
    ],
)
async def test_a_request_that_cannot_be_served_is_400_and_says_why(engine: Client, body, says):
    status, answer = await engine.post("/inference/v1/generate", body)
    assert status == 400
    assert says in answer["error"]["message"]


async def test_numbers_beyond_the_machine_s_are_served_and_do_not_end_the_engine(engine: Client):
    huge: dict[str, Any] = {"top_k": 2**70, "seed": -(2**70), "stop_token_ids": [2**70, -1], "max_tokens": 2**70, "top_p": 1e-300}
    assert (await engine.generate([1] * (CONTEXT - 3), **huge))["finish_reason"] in {"length", "stop"}
    assert (await engine.get("/health"))[0] == 200


async def test_a_body_without_end_is_refused_and_the_engine_serves_on(engine: Client):
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY_BYTES // (1 << 20) + 1):
            yield b" " * (1 << 20)

    with contextlib.suppress(aiohttp.ClientConnectionError):  # the connection may be closed while we still write
        async with engine.session.post(engine.url + "/inference/v1/generate", data=endless()) as response:
            assert response.status == 413
    assert (await engine.get("/health"))[0] == 200


async def test_unknown_paths_and_models_are_404_in_json(engine: Client):
    status, answer = await engine.get("/v1/nothing")
    assert (status, answer["error"]["code"]) == (404, 404)
    status, answer = await engine.post("/inference/v1/generate", {"token_ids": [1], "model": "adapter-3"})
    assert status == 404
    assert "adapter-3" in answer["error"]["message"]


async def test_seeds_reproduce_a_generation_whatever_runs_beside_it(engine: Client):
    alone = await engine.generate([1, 9, 9], seed=11, max_tokens=50, ignore_eos=True)
    company = [engine.generate([1, *range(3, 3 + i)], seed=i, max_tokens=10 + i, ignore_eos=True, temperature=0.8) for i in range(40)]
    again, *_ = await asyncio.gather(engine.generate([1, 9, 9], seed=11, max_tokens=50, ignore_eos=True), *company)
    other = await engine.generate([1, 9, 9], seed=12, max_tokens=50, ignore_eos=True)
    assert again["token_ids"] == alone["token_ids"] != other["token_ids"]


async def test_top_k_and_top_p_cut_the_distribution_and_its_logprobs(engine: Client):
    greedy = await engine.generate([1, 9], temperature=0, max_tokens=5, ignore_eos=True)
    for cut in ({"top_k": 1}, {"top_p": 1e-6}):
        choice = await engine.generate([1, 9], seed=3, max_tokens=5, ignore_eos=True, **cut)
        assert choice == greedy
    free = await engine.generate([1, 9], seed=3, max_tokens=5, ignore_eos=True)
    half = await engine.generate([1, 9], seed=3, max_tokens=1, ignore_eos=True, top_p=0.5)
    assert half["logprobs"]["content"][0]["logprob"] > min(entry["logprob"] for entry in free["logprobs"]["content"])


async def test_greedy_answers_have_log_probability_zero(engine: Client):
    choice = await engine.generate([1, 9], temperature=0, max_tokens=5, ignore_eos=True)
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [0] * 5


async def test_abort_needs_the_prefix_and_answers_the_waiting_client_with_what_there_is(engine: Client):
    [waiting] = await engine.begun(engine.generate([1, 3], request_id="a1", **LONG))
    await engine.post("/pause?mode=keep")
    assert (await engine.post("/inference/v1/abort_requests", {"request_ids": ["a1", "generate-tokens-unknown"]}))[0] == 200
    assert await engine.metric("num_requests_running") == 1
    assert (await engine.post("/inference/v1/abort_requests", {"request_ids": ["generate-tokens-a1"]}))[0] == 200
    choice = await waiting
    assert choice["finish_reason"] == "abort"
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 4
    assert choice["weight_versions"] == [{"version": "ab12cd-0", "start": 0, "end": len(choice["token_ids"])}]
    assert await engine.metric("num_requests_running") == 0


async def test_a_client_that_disconnects_frees_its_row(engine: Client):
    [waiting] = await engine.begun(engine.generate([1, 3], **LONG))
    await engine.post("/pause?mode=keep")  # it can not end by itself
    assert await engine.metric("num_requests_running") == 1
    waiting.cancel()
    await engine.until("num_requests_running", lambda running: running == 0)


async def test_the_same_request_id_twice_at_once_is_refused(engine: Client):
    await engine.post("/pause?mode=keep")
    waiting = asyncio.ensure_future(engine.generate([1, 3], request_id="twin", max_tokens=1))
    await engine.until("num_requests_waiting", lambda number: number == 1)
    status, answer = await engine.post("/inference/v1/generate", {"request_id": "twin", "token_ids": [1]})
    assert status == 400
    assert "in flight already" in answer["error"]["message"]
    await engine.post("/resume")
    await waiting


@pytest.mark.parametrize("clear_cache", ["true", "false"])
async def test_pause_keep_freezes_requests_holds_arrivals_and_resume_finishes_both(engine: Client, clear_cache):
    [live] = await engine.begun(engine.generate([1, 3], seed=1, **LONG))
    assert (await engine.post(f"/pause?mode=keep&clear_cache={clear_cache}"))[0] == 200
    assert await engine.get("/is_paused") == (200, {"is_paused": True})
    assert (await engine.get("/health"))[0] == 200
    frozen = await engine.metric("generation_tokens_total")
    late = asyncio.ensure_future(engine.generate([1, 4], seed=2, max_tokens=3, ignore_eos=True))
    await engine.until("num_requests_waiting", lambda waiting: waiting == 1)
    assert await engine.metric("generation_tokens_total") == frozen == 4
    await engine.post("/update_weight_version", {"new_version": "ab12cd-1"})
    await engine.post("/resume")
    assert await engine.get("/is_paused") == (200, {"is_paused": False})
    spans = (await live)["weight_versions"]
    assert [span["version"] for span in spans] == ["ab12cd-0", "ab12cd-1"]
    assert [spans[0]["start"], spans[0]["end"], spans[1]["end"]] == [0, spans[1]["start"], 400]
    assert spans[0]["end"] == frozen
    assert (await late)["weight_versions"] == [{"version": "ab12cd-1", "start": 0, "end": 3}]


async def test_pause_wait_returns_when_the_last_request_is_done_and_holds_arrivals(engine: Client):
    live = await engine.begun(*(engine.generate([1, 3 + i], max_tokens=60 + i, ignore_eos=True) for i in range(5)))
    pausing = asyncio.ensure_future(engine.post("/pause?mode=wait"))
    await engine.until("generation_tokens_total", lambda tokens: tokens > 5 * 4)  # it goes on: the pause has begun
    late = asyncio.ensure_future(engine.generate([1, 4], max_tokens=3, ignore_eos=True))
    assert (await pausing)[0] == 200
    assert await engine.metric("num_requests_running") == 0
    assert [len(choice["token_ids"]) for choice in await asyncio.gather(*live)] == [60, 61, 62, 63, 64]
    await engine.until("num_requests_waiting", lambda waiting: waiting == 1)
    assert not late.done()
    await engine.post("/resume")
    assert len((await late)["token_ids"]) == 3


async def test_pause_abort_ends_what_runs_and_holds_arrivals(tiny_qwen3: Path):
    async with engine_on(tiny_qwen3, max_sequences=2) as engine:
        live = await engine.begun(*(engine.generate([1, 3 + i], **LONG) for i in range(4)))
        assert (await engine.post("/pause"))[0] == 200
        choices = await asyncio.gather(*live)
        assert [choice["finish_reason"] for choice in choices] == ["abort"] * 4
        assert sorted(bool(choice["token_ids"]) for choice in choices) == [False, False, True, True]
        late = asyncio.ensure_future(engine.generate([1], max_tokens=3, ignore_eos=True))
        await engine.until("num_requests_waiting", lambda waiting: waiting == 1)
        await engine.post("/resume")
        assert (await late)["finish_reason"] == "length"


async def test_an_unknown_pause_mode_is_refused(engine: Client):
    status, answer = await engine.post("/pause?mode=sleep")
    assert status == 400
    assert "sleep" in answer["error"]["message"]
    assert await engine.get("/is_paused") == (200, {"is_paused": False})


async def test_a_reload_swaps_weights_and_label_as_a_fresh_engine_would_serve_them(engine: Client, make_checkpoint):
    second = make_checkpoint("qwen3", 1)
    before = await engine.generate([1, 8], seed=4, max_tokens=20, ignore_eos=True)
    await engine.post("/pause?mode=keep")
    status, _ = await engine.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(second)}})
    assert status == 200
    assert await engine.get("/weight_info") == (200, {"weight_version": "ab12cd-0"})
    assert await engine.get("/version") == (200, {"version": __version__, "software": "headway"})
    await engine.post("/update_weight_version", {"new_version": "ab12cd-1"})
    await engine.post("/reset_prefix_cache")
    await engine.post("/resume")
    assert await engine.get("/weight_info") == (200, {"weight_version": "ab12cd-1"})
    after = await engine.generate([1, 8], seed=4, max_tokens=20, ignore_eos=True)
    assert after["weight_versions"] == [{"version": "ab12cd-1", "start": 0, "end": 20}]
    async with engine_on(second, label="ab12cd-1") as fresh:
        assert await fresh.generate([1, 8], seed=4, max_tokens=20, ignore_eos=True) == after
    assert after["logprobs"] != before["logprobs"]


def spoil(directory: Path, how: str) -> str:
    """Spoil a copy of a checkpoint; return a word that the refusal must hold."""
    file = directory / "model.safetensors"
    if how == "missing directory":
        shutil.rmtree(directory)
        return "is no directory"
    if how == "truncated file":
        file.write_bytes(file.read_bytes()[:-100])
        return "header promises"
    if how == "cut inside the header":
        file.write_bytes(file.read_bytes()[:200])
        return "truncated"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    if how == "lacking tensor":
        del tensors[name]
    elif how == "lacking head":
        del tensors[name := "lm_head.weight"]
    elif how == "wrong type":
        tensors[name] = tensors[name].to(torch.int8)
    elif how == "foreign tensor":
        tensors[name := "model.layers.2.mlp.up_proj.weight"] = torch.zeros(3)
    else:
        tensors[name] = torch.zeros(128, 65)
    save_file(tensors, file, metadata={"format": "pt"})
    return name


@pytest.mark.parametrize(
    "how",
    [
        "missing directory",
        "truncated file",
        "cut inside the header",
        "lacking tensor",
        "lacking head",
        "foreign tensor",
        "wrong shape",
        "wrong type",
    ],
)
async def test_a_bad_checkpoint_is_refused_by_name_and_the_old_weights_serve_on(engine: Client, make_checkpoint, tmp_path: Path, how):
    directory = tmp_path / "bad"
    shutil.copytree(make_checkpoint("qwen3", 1), directory)
    says = spoil(directory, how)
    before = await engine.generate([1, 8], seed=4, max_tokens=20)
    await engine.post("/pause?mode=keep")
    status, answer = await engine.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}})
    assert status == 400
    assert says in answer["error"]["message"]
    assert str(directory) in answer["error"]["message"]
    await engine.post("/resume")
    assert (await engine.get("/health"))[0] == 200
    assert await engine.generate([1, 8], seed=4, max_tokens=20) == before


async def test_other_rpc_methods_are_refused(engine: Client):
    status, answer = await engine.post("/collective_rpc", {"method": "sleep", "kwargs": {}})
    assert status == 400
    assert "reload_weights" in answer["error"]["message"]


async def test_models_names_the_model_and_its_context(tiny_qwen3: Path):
    async with engine_on(tiny_qwen3, max_context_tokens=100) as engine:
        _, answer = await engine.get("/v1/models")
        assert answer["data"][0]["id"] == tiny_qwen3.name
        assert answer["data"][0]["max_model_len"] == 100
        assert (await engine.post("/inference/v1/generate", {"token_ids": [1] * 100}))[0] == 400


async def test_a_dead_model_thread_is_503_and_tells_everyone_who_waits(engine: Client):
    await engine.post("/pause?mode=keep")
    waiting = asyncio.ensure_future(engine.post("/inference/v1/generate", {"token_ids": [1]}))
    await engine.until("num_requests_waiting", lambda number: number == 1)

    def break_down(_: object) -> None:
        raise RuntimeError("out of memory")

    engine.thread.command(break_down)
    assert "out of memory" in repr(await engine.thread.died)
    for status, answer in (await waiting, await engine.get("/health"), await engine.post("/inference/v1/generate", {"token_ids": [1]})):
        assert status == 503
        assert "out of memory" in answer["error"]["message"]
