"""Every token's log-probability is that of the weights that its span names, on the cache that the pause mode promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pathlib import Path  # noqa: E402

from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402

from headway.embedded.engine.model import load_model  # noqa: E402
from headway.embedded.engine.request import Request  # noqa: E402
from headway.embedded.engine.scheduler import Scheduler  # noqa: E402

pytestmark = pytest.mark.torch

TOLERANCE = 1e-4


def scheduler(directory: Path, *, max_rows: int = 8) -> Scheduler:
    model = load_model(directory, device=torch.device("cpu"), dtype=torch.float32, max_rows=max_rows, max_context_tokens=0)
    return Scheduler(model, max_rows=max_rows, label="a-0")


def request(key: int, prompt_size: int, max_tokens: int) -> Request:
    prompt = np.random.default_rng(key).integers(3, 57, size=prompt_size).tolist()
    return Request(key, prompt, max_tokens, temperature=1.0, top_p=1.0, top_k=0, seed=key, stop_ids=())


def run_with_swaps(make_checkpoint, family: str, *, recompute: bool) -> list[Request]:
    """Eleven requests of uneven sizes on 8 rows, joining as others end; weights swap after steps 9 and 23."""
    engine = scheduler(make_checkpoint(family, 0))
    sizes = [(3, 40), (17, 12), (1, 64), (30, 30), (9, 5), (2, 1), (70, 50), (5, 33), (4, 20), (11, 1), (6, 45)]
    arrivals = {0: 4, 5: 3, 12: 4}
    pending = [request(key, *size) for key, size in enumerate(sizes)]
    finished: list[Request] = []
    step = 0
    while engine.busy or pending:
        for _ in range(arrivals.get(step, 0)):
            engine.submit(pending.pop(0))
        if step in {9, 23}:
            version = 1 if step == 9 else 2
            assert engine.pause("keep", recompute=recompute) == []
            assert not engine.busy
            engine.load(make_checkpoint(family, version))
            engine.relabel(f"a-{version}")
            engine.resume()
        finished += engine.step()
        step += 1
    assert len(finished) == len(sizes)
    return finished


def reference_models(make_checkpoint, family: str) -> dict[str, Any]:
    return {f"a-{v}": AutoModelForCausalLM.from_pretrained(make_checkpoint(family, v), dtype=torch.float32).eval() for v in range(3)}


def at(logits: Any, token_ids: list[int]) -> np.ndarray:
    return logits.log_softmax(-1).gather(-1, torch.tensor(token_ids)[:, None])[:, 0].numpy()


def check_shape(finished: list[Request]) -> None:
    for done in finished:
        assert len(done.token_ids) == len(done.logprobs) == done.max_tokens
        assert done.finish_reason == "length"
        spans = done.stamped_spans()
        assert [span[1] for span in spans] == [0, *(span[2] for span in spans[:-1])]
        assert spans[-1][2] == len(done.token_ids)
    assert max(len(done.stamped_spans()) for done in finished) == 3


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe", "qwen3_tied"])
@torch.inference_mode()
def test_recomputed_caches_give_the_logprobs_of_a_plain_forward_under_each_spans_weights(make_checkpoint, family):
    models = reference_models(make_checkpoint, family)
    finished = run_with_swaps(make_checkpoint, family, recompute=True)
    check_shape(finished)
    for done in finished:
        sequence = torch.tensor([done.prompt + done.token_ids])
        for label, start, end in done.stamped_spans():
            logits = models[label](sequence, use_cache=False).logits[0, len(done.prompt) - 1 : -1]
            np.testing.assert_allclose(done.logprobs[start:end], at(logits, done.token_ids)[start:end], atol=TOLERANCE)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@torch.inference_mode()
def test_kept_caches_give_the_logprobs_of_a_replay_that_builds_the_cache_span_by_span(make_checkpoint, family):
    models = reference_models(make_checkpoint, family)
    finished = run_with_swaps(make_checkpoint, family, recompute=False)
    check_shape(finished)
    for done in finished:
        sequence, prompt = done.prompt + done.token_ids, len(done.prompt)
        cache, fed = DynamicCache(), 0
        for label, start, end in done.stamped_spans():
            part = torch.tensor([sequence[fed : prompt + end - 1]])
            logits = models[label](part, past_key_values=cache, use_cache=True).logits[0, -(end - start) :]
            fed = prompt + end - 1
            np.testing.assert_allclose(done.logprobs[start:end], at(logits, done.token_ids[start:end]), atol=TOLERANCE)


@torch.inference_mode()
def test_a_kept_cache_and_a_recomputed_one_differ_after_a_swap(make_checkpoint):
    """Otherwise the two tests above could not tell one mode from the other."""
    kept, recomputed = (run_with_swaps(make_checkpoint, "qwen3", recompute=mode) for mode in (False, True))
    by_key = {done.key: done for done in recomputed}
    swapped = [done for done in kept if len(done.stamped_spans()) > 1]
    assert any(not np.allclose(done.logprobs, by_key[done.key].logprobs, atol=1e-2) for done in swapped)


def test_a_request_samples_the_same_tokens_alone_and_in_any_company(tiny_qwen3):
    def tokens_of(companions: int, *, late: bool) -> list[int]:
        engine = scheduler(tiny_qwen3)
        others = [request(100 + i, 2 + 5 * i, 7 + i) for i in range(companions)]
        for other in others:
            engine.submit(other)
        if late:
            engine.step()
        engine.submit(request(1, 6, 40))
        finished: list[Request] = []
        while engine.busy:
            finished += engine.step()
        return next(done.token_ids for done in finished if done.key == 1)

    alone = tokens_of(0, late=False)
    assert len(alone) == 40
    assert tokens_of(5, late=False) == alone
    assert tokens_of(12, late=True) == alone


def test_more_requests_than_rows_wait_their_turn_and_all_end(tiny_qwen3):
    engine = scheduler(tiny_qwen3, max_rows=3)
    for key in range(20):
        engine.submit(request(key, 1 + key % 5, 1 + key % 7))
    engine.step()
    assert len(engine.live) <= 3
    finished = []
    while engine.busy:
        finished += engine.step()
    assert not engine.live
    assert not engine.waiting


def test_a_model_whose_output_is_not_a_number_ends_requests_as_errors_and_leaves_no_trace_in_the_cache(tiny_qwen3, make_checkpoint):
    engine = scheduler(tiny_qwen3)
    engine.submit(request(1, 5, 10))
    engine.step()
    with torch.no_grad():
        engine._model._model.lm_head.weight.fill_(float("nan"))
        engine._model._model.model.layers[0].self_attn.v_proj.weight.fill_(float("nan"))
    (ended,) = engine.step()
    assert ended.finish_reason == "error"
    assert len(ended.token_ids) == len(ended.logprobs) == 2
    engine.load(tiny_qwen3)
    engine.submit(request(2, 3, 20))
    finished = []
    while engine.busy:
        finished += engine.step()
    assert finished[0].finish_reason == "length"
    assert np.isfinite(finished[0].logprobs).all()
