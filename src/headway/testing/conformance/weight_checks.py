"""Checks of weight syncs between two checkpoints: who wrote each token, what a cache remembers, what a bad checkpoint does.

Which weights wrote a token is told by greedy continuations: the token at place i must be the likeliest one after what stands before it,
under the weights of its stamp. Four tokens on each side of a switch are looked at, and half precision may be wrong about one in four.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

from headway.adapters.engines.client import EngineClient
from headway.adapters.engines.generation import Generated
from headway.errors import HeadwayError
from headway.protocols import Engine
from headway.testing.conformance.bench import Bench
from headway.testing.conformance.damaged import DAMAGES, damaged
from headway.testing.conformance.verdicts import Failed, Missed, Skipped, expect
from headway.testing.conformance.visiting import LINEAGE, administer, give
from headway.types import Checkpoint, SamplingParams

_SIDE = 4
_ENOUGH = 0.75
_ABSOLUTE, _RELATIVE = 0.1, 0.05
_GREEDY = SamplingParams(temperature=1.0, top_k=1)
_versions = count()


class _Written(NamedTuple):
    """A token of an answer, to be judged: what stands before it, the token, whether the new weights are said to have written it."""

    before: list[int]
    token: int
    is_new: bool


async def in_flight(bench: Bench) -> str:
    """weight_sync = "in_flight": generations go on under the new weights, and each token has the label of those that wrote it."""
    return await _sync(bench, "in_flight")


async def abort_resume(bench: Bench) -> str:
    """weight_sync = "abort_resume": generations are aborted and continued, whole, each token with the label of what wrote it."""
    return await _sync(bench, "abort_resume")


async def wait(bench: Bench) -> str:
    """weight_sync = "wait": no generation has tokens of two versions."""
    return await _sync(bench, "wait")


async def fresh_cache(bench: Bench) -> str:
    """A prompt that was cached under the old weights is computed anew under the new ones."""
    prompt = bench.prompt(64)
    async with _at_both(bench, "in_flight") as (engine, old, new):
        await give(bench, engine, old)
        for _ in range(2):
            await bench.server.generate(bench.name(), prompt, max_tokens=4)
        await give(bench, engine, new)
        after = await _sampled(bench, prompt)
        await bench.server.forget()
        anew = await _sampled(bench, prompt)
    for one, two in zip(after, anew, strict=True):
        if one[0] == two[0]:
            near = abs(one[1] - two[1]) <= _ABSOLUTE + _RELATIVE * abs(two[1])
            expect(near, f"token {one[0]} has logprob {one[1]:.3f} with the cache, {two[1]:.3f} without: the cache is of older weights")
    same = sum(one[0] == two[0] for one, two in zip(after, anew, strict=True))
    expect(same > 0, "no token is the same with the cache and without: the cache is of older weights")
    return ""


async def bad_checkpoints(bench: Bench) -> str:
    """A checkpoint that is missing, cut, incomplete or of other shapes is refused, and the server serves on as before."""
    model, _ = _both(bench)
    async with _at_both(bench, "in_flight") as (engine, old, _):
        await give(bench, engine, old)
        with tempfile.TemporaryDirectory(prefix="headway-conformance-") as place:
            for damage in DAMAGES:
                bad = _labelled(damaged(model, Path(place) / damage, damage))
                try:
                    await engine.prepare(bad)
                    await engine.transfer(bad)
                    await engine.commit(bad)
                except HeadwayError:
                    await engine.abandon()
                else:
                    raise Failed(f"a checkpoint with {damage} was taken")
                told = await bench.server.label()
                expect(told == old.label, f'after a checkpoint with {damage} it serves "{told}", before "{old.label}"')
                expect(await bench.server.is_paused() is not True, f"after a checkpoint with {damage} it stayed paused")
                await bench.server.generate(bench.name(), bench.prompt(), max_tokens=2)
    return ", ".join(DAMAGES)


async def _sync(bench: Bench, mode: str) -> str:
    tokens = await bench.long()
    async with _at_both(bench, mode) as (engine, old, new):
        await give(bench, engine, old)
        prompts = [bench.prompt() for _ in range(bench.settings.in_flight)]
        answers = await _written_meanwhile(bench, prompts, tokens, engine, new)
        for answer in answers:
            whole = answer.finish == "stop" or len(answer.token_ids) == tokens
            expect(whole, f"{len(answer.token_ids)} of {tokens} tokens came back, with {answer.finish!r}")
        straddling = sum(len(answer.spans) > 1 for answer in answers)
        if mode == "wait":
            expect(not straddling, f"{straddling} of {len(answers)} generations have tokens of two versions")
        if bench.server.route == "completions":
            return "stamps are conservative: /v1/completions names no versions"
        places = [place for prompt, answer in zip(prompts, answers, strict=True) for place in _places(prompt, answer, new.version)]
        by_new = await _likeliest(bench, places)
        await give(bench, engine, _labelled(Path(old.directory)))
        by_old = await _likeliest(bench, places)
    told = _judged(places, by_old, by_new)
    if mode != "wait" and not straddling:
        raise Missed(f"none of {len(answers)} generations has tokens of both versions: ask for more tokens")
    return f"{told}; {straddling} of {len(answers)} met the switch"


async def _written_meanwhile(bench: Bench, prompts: list[list[int]], tokens: int, engine: Engine, new: Checkpoint) -> list[Generated]:
    client = EngineClient(LINEAGE, retries=1)
    asks = [
        asyncio.create_task(
            client.generate(bench.server.address, prompt, _GREEDY, seed=seed, max_tokens=tokens, request_id=bench.name(str(seed)))
        )
        for seed, prompt in enumerate(prompts)
    ]
    try:
        while not any(ask.done() for ask in asks):
            running = await bench.server.running()
            if running is None or running >= len(asks):
                break
            await asyncio.sleep(0.01)
        await give(bench, engine, new)
        return await asyncio.gather(*asks)
    except HeadwayError as error:
        raise Failed(f"a generation that met the sync failed: {error}") from error
    finally:
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)
        await client.close()


def _places(prompt: list[int], answer: Generated, new: int) -> list[_Written]:
    """Return the tokens on both sides of the switch; of an answer without one, the first and the last."""
    ids = answer.token_ids
    switch = next((start for start, version in answer.spans if version == new), len(ids))
    chosen = {place for place in range(switch - _SIDE, switch + _SIDE) if 0 <= place < len(ids)}
    return [_Written(prompt + ids[:place], ids[place], place >= switch) for place in sorted(chosen)]


async def _likeliest(bench: Bench, places: Sequence[_Written]) -> list[bool]:
    """Say of each token whether it is the likeliest one there, under the weights that are served now, whatever a cache remembers."""
    await bench.server.forget()
    asks = (bench.server.generate(bench.name(), place.before, max_tokens=1, temperature=0.0) for place in places)
    return [answer.ids[:1] == [place.token] for place, answer in zip(places, await asyncio.gather(*asks), strict=True)]


def _judged(places: Sequence[_Written], by_old: Sequence[bool], by_new: Sequence[bool]) -> str:
    told: list[str] = []
    for is_new, name in ((False, "old"), (True, "new")):
        chosen = [place for place, written in enumerate(places) if written.is_new == is_new]
        if not chosen:
            continue
        right, wrong = (by_new, by_old) if is_new else (by_old, by_new)
        fits, fits_other = (sum(of[place] for place in chosen) / len(chosen) for of in (right, wrong))
        if fits >= _ENOUGH and fits_other >= _ENOUGH:
            raise Skipped("the two checkpoints write alike: give others")
        expect(fits >= _ENOUGH, f"of {len(chosen)} tokens stamped with the {name} weights these would have written {fits:.0%}")
        told.append(f"{len(chosen)} tokens stamped {name}, {fits:.0%} as these weights write")
    return ", ".join(told)


async def _sampled(bench: Bench, prompt: list[int]) -> list[tuple[int, float]]:
    answers = [await bench.server.generate(bench.name(), prompt, max_tokens=1, seed=seed) for seed in range(8)]
    expect(all(answer.ids and answer.logprobs for answer in answers), "no token, or no logprob, came back")
    return [(answer.ids[0], answer.logprobs[0]) for answer in answers]


def _both(bench: Bench) -> tuple[Path, Path]:
    if bench.model is None or bench.other is None:
        raise Skipped("needs --model, the checkpoint that is served, and --other, one of the same shapes")
    return bench.model, bench.other


def _labelled(directory: Path) -> Checkpoint:
    """Return a checkpoint under a label of our own that none had before."""
    version = next(_versions)
    return Checkpoint(version, f"{LINEAGE}-{version}", str(directory))


@asynccontextmanager
async def _at_both(bench: Bench, mode: str) -> AsyncIterator[tuple[Engine, Checkpoint, Checkpoint]]:
    """Administer the server within the block: how, and both checkpoints under labels of our own."""
    model, other = _both(bench)
    engine = administer(bench, mode)
    try:
        yield engine, _labelled(model), _labelled(other)
    finally:
        await engine.abandon()
        await engine.close()
