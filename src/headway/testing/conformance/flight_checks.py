"""Checks of many generations, and of those that are interrupted: concurrency, cancelling, aborts, pauses."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

from headway.testing.conformance.bench import Bench
from headway.testing.conformance.generation_checks import tokens_of
from headway.testing.conformance.verdicts import Missed, Skipped, expect

_HELD_SECONDS = 0.5
_MOST_HELD_SECONDS = 10.0  # of a pause: as long as the generation before it takes alone, so that one that goes on is done by then
_ARRIVES_SECONDS = 0.05  # for an answer that was on its way when the pause came


async def concurrency(bench: Bench) -> str:
    """So many requests at once are all answered, whole, each for itself."""
    count, started = bench.settings.concurrency, time.monotonic()
    asks = (bench.server.generate(bench.name(str(n)), bench.prompt(), max_tokens=16, seed=n) for n in range(count))
    answers = await asyncio.gather(*asks)
    whole = sum(bool(answer.ids) and len(answer.ids) == len(answer.logprobs) for answer in answers)
    expect(whole == count, f"{whole} of {count} answers were whole")
    expect(len({tuple(answer.ids) for answer in answers}) > 1, f"{count} different prompts brought the same tokens")
    return f"{count} requests, {tokens_of(answers) / (time.monotonic() - started):.0f} tokens/s"


async def cancelled(bench: Bench) -> str:
    """A client that leaves frees its slot."""
    if await bench.server.running() is None:
        raise Skipped("the server has no metrics that say what runs (SGLang: --enable-metrics)")
    await bench.until_idle(bench.settings.freed_seconds)
    async with bench.in_flight("leaves", await bench.long()) as (_, task):
        task.cancel()
        await asyncio.wait({task})
        left = time.monotonic()
        await bench.until_idle(bench.settings.freed_seconds)
    return f"after {time.monotonic() - left:.2f} s"


async def aborted(bench: Bench) -> str:
    """A generation that is aborted is answered with "abort" and the tokens that it has."""
    if bench.server.route == "completions":
        raise Skipped("/v1/completions cannot be aborted by id")
    most = await bench.long()
    async with bench.in_flight("aborted", most) as (name, task):
        await bench.server.abort(name)
        if task.done() and task.result().finish in {"length", "stop"}:
            raise Missed(f"all {len(task.result().ids)} tokens were written before the abort came: ask for more")
        done, _ = await asyncio.wait({task}, timeout=bench.settings.freed_seconds)
        expect(bool(done), f"no answer within {bench.settings.freed_seconds:g} s of the abort")
        answer = task.result()
    expect(answer.finish == "abort", f"it ended with {answer.finish!r} after {len(answer.ids)} tokens")
    expect(len(answer.logprobs) == len(answer.ids), f"{len(answer.logprobs)} logprobs for {len(answer.ids)} ids")
    return f"{len(answer.ids)} of {most} tokens came back"


async def paused(bench: Bench) -> str:
    """Requests during a pause wait, those before it go on after it, none is lost."""
    server, most, started = bench.server, await bench.long(), time.monotonic()
    await server.generate(bench.name("alone"), bench.prompt(), max_tokens=most, endless=True)
    held = min(max(time.monotonic() - started, _HELD_SECONDS), _MOST_HELD_SECONDS)
    async with bench.in_flight("before", most) as (_, before), AsyncExitStack() as asked:
        try:
            await server.pause()
            _, during = await asked.enter_async_context(bench.asked("during", max_tokens=4))
            await asyncio.wait({before}, timeout=_ARRIVES_SECONDS)
            if before.done():
                raise Missed(f"all {len(before.result().ids)} tokens were written before the pause came: ask for more")
            await asyncio.wait({before, during}, timeout=held, return_when=asyncio.FIRST_COMPLETED)
            expect(not during.done(), "a request that came during the pause was answered during it")
            expect(not before.done(), "a generation that was under way when the pause came went on during it")
            said = await server.is_paused()
            expect(said is not False, "the server says that it is not paused")
        except asyncio.CancelledError:
            raise  # whoever cuts the check short resumes the server, and says so
        except BaseException:
            await server.resume()
            raise
        await server.resume()
        answers = await asyncio.gather(before, during)
    expect(await server.is_paused() is not True, "the server says that it is paused after it was resumed")
    for answer in answers:
        expect(answer.finish in {"length", "stop"}, f"a generation ended with {answer.finish!r} after {len(answer.ids)} tokens")
        expect(len(answer.logprobs) == len(answer.ids), f"{len(answer.logprobs)} logprobs for {len(answer.ids)} ids")
    return ""
