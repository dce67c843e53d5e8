"""Checks of single generations: exact ids and logprobs, the distribution they are of, limits, stops, seeds, refusals."""

from __future__ import annotations

import asyncio
import json
from math import isfinite
from pathlib import Path

from headway.adapters.engines.client import EngineClient
from headway.adapters.engines.generation import ContextExceeded, GenerationFailed, excerpt
from headway.testing.conformance.bench import Bench
from headway.testing.conformance.server import Answer
from headway.testing.conformance.verdicts import Failed, Skipped, expect
from headway.types import SamplingParams

_HIGHEST = 1e-3  # half precision rounds
_SAME = 1e-4
_RAW_BELOW = -0.01
_NO_ID = 2**31 - 1


async def health(bench: Bench) -> str:
    """The server says that it is well."""
    response = await bench.server.call("GET", "/health")
    expect(response.status == 200, f"GET /health answered {response.status}: {excerpt(response.body)}")
    return ""


async def label(bench: Bench) -> str:
    """The server says which weights it serves."""
    return f'it serves "{await bench.server.label()}"'


async def exact(bench: Bench) -> str:
    """Each token comes as an id with a finite logprob of at most 0, and with the label of the weights that wrote it."""
    answer = await bench.server.generate(bench.name(), bench.prompt(), max_tokens=16, seed=11)
    ids, logprobs = answer.ids, answer.logprobs
    expect(bool(ids), "no token came back")
    expect(all(token >= 0 for token in ids), f"the ids are {ids}")
    expect(len(logprobs) == len(ids), f"{len(logprobs)} logprobs for {len(ids)} ids")
    expect(all(isfinite(value) and value <= _HIGHEST for value in logprobs), f"the logprobs are {logprobs}")
    if answer.spans is None:
        expect(bench.server.route == "completions", "the answer names no weight_versions")
        return "by /v1/completions: no versions per token, stamps are conservative (start vLLM with --enable-scale-out)"
    at = 0
    for _, start, end in answer.spans:
        expect(start == at and end > start, f"weight_versions {answer.spans} do not cover {len(ids)} tokens once each")
        at = end
    expect(at == len(ids), f"weight_versions {answer.spans} do not cover {len(ids)} tokens once each")
    labels = {name for name, _, _ in answer.spans}
    expect(not bench.label or labels == {bench.label}, f'tokens are stamped {sorted(labels)}, served is "{bench.label}"')
    return ""


async def processed(bench: Bench) -> str:
    """Logprobs are of the distribution that was sampled from, not of the one before temperature and top_k."""
    prompt = bench.prompt()
    cold, warm = [
        await bench.server.generate(bench.name(), prompt, max_tokens=8, temperature=temperature, likeliest=True, seed=3)
        for temperature in (0.5, 1.0)
    ]
    expect(bool(cold.logprobs and warm.logprobs), "no logprobs came back")
    pairs = list(zip(cold.logprobs, warm.logprobs, strict=False))
    if all(abs(one - two) <= _SAME for one, two in pairs) and min(warm.logprobs) < _RAW_BELOW:
        flag = "" if bench.server.is_sglang else ": start vLLM with --logprobs-mode processed_logprobs"
        raise Failed(f"logprobs are raw, {pairs[0][0]:.3f} at temperature .5 as at 1{flag}")
    if min(warm.logprobs) < _RAW_BELOW:  # nothing is cut off while top_p is 1 and top_k 0
        return "divided by the temperature, not renormalised over top_k: rollout.top_p must be 1 and rollout.top_k 0"
    return ""


async def max_tokens(bench: Bench) -> str:
    """max_tokens is kept, and a generation that it ended says "length"."""
    for most in (1, 7):
        answer = await bench.server.generate(bench.name(), bench.prompt(), max_tokens=most, seed=5)
        expect(0 < len(answer.ids) <= most, f"{len(answer.ids)} tokens came back where at most {most} were asked for")
        expect(answer.finish in {"length", "stop"}, f"it ended with {answer.finish!r}")
        expect(answer.finish == "stop" or len(answer.ids) == most, f'it ended with "length" after {len(answer.ids)} of {most} tokens')
    return ""


async def stop_ids(bench: Bench) -> str:
    """A generation ends at the first of stop_token_ids, which is part of the answer."""
    prompt = bench.prompt()
    free = await bench.server.generate(bench.name(), prompt, max_tokens=12, temperature=0.0)
    expect(bool(free.ids), "no token came back")
    stop = free.ids[len(free.ids) // 2]
    first = free.ids.index(stop) + 1
    answer = await bench.server.generate(bench.name(), prompt, max_tokens=12, temperature=0.0, stops=[stop])
    expect(answer.finish == "stop", f"it ended with {answer.finish!r}; tokens {answer.ids}, stop id {stop}")
    expect(answer.ids[-1:] == [stop], f"its last token is {answer.ids[-1:]}, not the stop id {stop}")
    expect(stop not in answer.ids[:-1], f"it went on after the stop id {stop}: {answer.ids}")
    return "" if answer.ids == free.ids[:first] else "the greedy tokens before it differ from run to run"


async def end_included(bench: Bench) -> str:
    """A generation that ended by itself has the end-of-sequence token as its last one."""
    asks = (bench.server.generate(bench.name(), bench.prompt(), max_tokens=32, seed=seed) for seed in range(16))
    ended = [answer for answer in await asyncio.gather(*asks) if answer.finish == "stop"]
    if not ended:
        raise Skipped("none of 16 generations of 32 tokens ended by itself")
    known = _end_ids(bench.model) if bench.model else set()
    if not known and len(ended) < 2:
        raise Skipped("one generation ended by itself: without --model nobody knows the end token")
    lasts = {answer.ids[-1] if answer.ids else None for answer in ended}
    if known:
        expect(lasts <= known, f"generations ended by themselves with {sorted(map(str, lasts))}, the model's end is {sorted(known)}")
    else:
        expect(
            None not in lasts and len(lasts) <= max(1, len(ended) // 2), f"{len(ended)} generations ended with {sorted(map(str, lasts))}"
        )
    return f"{len(ended)} of 16 ended by themselves"


async def seeds(bench: Bench) -> str:
    """Seeds up to 2^63 - 1 are taken, and another seed brings other tokens."""
    prompt = bench.prompt()
    answers = [await bench.server.generate(bench.name(), prompt, max_tokens=16, seed=seed) for seed in (0, 1, 2, 2**63 - 1)]
    expect(len({tuple(answer.ids) for answer in answers}) > 1, f"four seeds brought the same tokens at temperature 1: {answers[0].ids}")
    again = await bench.server.generate(bench.name(), prompt, max_tokens=16, seed=1)
    return "" if again.ids == answers[1].ids else "a seed does not bring the same tokens again (rollouts are not reproducible)"


async def too_long(bench: Bench) -> str:
    """A prompt longer than the context is refused with 400, and our client says so."""
    length = await bench.server.context() + 8
    prompt = bench.prompt(length)
    response = await bench.server.send(bench.name(), prompt, max_tokens=1)
    expect(response.status == 400, f"{length} tokens were answered {response.status}: {excerpt(response.body)}")
    try:
        await _with_client(bench, prompt)
    except ContextExceeded:
        return ""
    except GenerationFailed as error:
        raise Failed(f"headway does not see that this is about the context: {error}") from error
    raise Failed("the same prompt was served at the second try")


async def no_such_id(bench: Bench) -> str:
    """An id outside the vocabulary is refused with 400, our client does not repeat it, and the server serves on."""
    prompt = [*bench.prompt(), _NO_ID]
    response = await bench.server.send(bench.name(), prompt, max_tokens=1)
    expect(response.status == 400, f"id {_NO_ID} was answered {response.status}: {excerpt(response.body)}")
    try:
        await _with_client(bench, prompt)
    except GenerationFailed as error:
        expect(not error.retryable, f"headway would try again: {error}")
    except ContextExceeded as error:
        raise Failed(f"headway takes it for a prompt that is too long: {error}") from error
    else:
        raise Failed("the same prompt was served at the second try")
    await bench.server.generate(bench.name(), bench.prompt(), max_tokens=2)
    return ""


async def _with_client(bench: Bench, prompt: list[int]) -> None:
    client = EngineClient(bench.label.rpartition("-")[0] or "conformance", retries=0)
    try:
        await client.generate(bench.server.address, prompt, SamplingParams(), seed=1, max_tokens=1, request_id=bench.name())
    finally:
        await client.close()


def _end_ids(model: Path) -> set[int]:
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = model / name
        told = json.loads(path.read_bytes()).get("eos_token_id") if path.exists() else None
        found |= set(told if isinstance(told, list) else [] if told is None else [told])
    return found


def tokens_of(answers: list[Answer]) -> int:
    """Return how many tokens these answers have."""
    return sum(len(answer.ids) for answer in answers)
