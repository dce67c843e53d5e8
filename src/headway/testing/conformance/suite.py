"""Runs the checks one after the other, each within its limit, and leaves the server as it was found."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from headway.errors import HeadwayError
from headway.testing.conformance import adapter_check, flight_checks, generation_checks, weight_checks
from headway.testing.conformance.bench import Bench, ConformanceSettings
from headway.testing.conformance.opening import Unusable, open_bench
from headway.testing.conformance.server import Server
from headway.testing.conformance.verdicts import Failed, Missed, Skipped, Verdict
from headway.testing.conformance.visiting import restored
from headway.types import EngineAddress

Check = Callable[[Bench], Awaitable[str]]
_DEFAULT = ConformanceSettings()
_TRIES = 3  # of a check for which a generation must be met in flight: who looks may have stood still

CHECKS: dict[str, Check] = {
    "health": generation_checks.health,
    "label": generation_checks.label,
    "exact": generation_checks.exact,
    "logprobs": generation_checks.processed,
    "max-tokens": generation_checks.max_tokens,
    "stop-ids": generation_checks.stop_ids,
    "end-included": generation_checks.end_included,
    "seeds": generation_checks.seeds,
    "too-long": generation_checks.too_long,
    "no-such-id": generation_checks.no_such_id,
    "concurrency": flight_checks.concurrency,
    "cancelled": flight_checks.cancelled,
    "aborted": flight_checks.aborted,
    "paused": flight_checks.paused,
    "sync-in-flight": weight_checks.in_flight,
    "sync-abort-resume": weight_checks.abort_resume,
    "sync-wait": weight_checks.wait,
    "fresh-cache": weight_checks.fresh_cache,
    "bad-checkpoints": weight_checks.bad_checkpoints,
    "adapters": adapter_check.adapters,
    "restored": restored,
}
"""Name to check, in the order in which they run; the first line of a check's docstring is what it proves."""


async def run_conformance(
    address: EngineAddress,
    *,
    model: Path | None = None,
    other: Path | None = None,
    adapter: Path | None = None,
    settings: ConformanceSettings = _DEFAULT,
    told: Callable[[Verdict], None] = lambda _: None,
    noted: Callable[[str], None] = lambda _: None,
) -> list[Verdict]:
    """Check a server; returns a verdict per check, and tells each as it falls.

    `model`: directory of the checkpoint that it serves, `other`: one of the same shapes; without both no weights are changed. `adapter`: a
    LoRA adapter of the model. Paths must be readable by the server. Afterwards it serves `model` under the label that it had, unpaused.
    So it does after a cancellation, which `noted` is told of, with what came of it.
    """
    server = Server(address)
    bench = Bench(server, settings, model=model, other=other, adapter=adapter)
    verdicts: list[Verdict] = []
    begun = False
    try:
        unusable = await open_bench(bench)
        begun = unusable is None
        for name, check in CHECKS.items():
            verdict = await judged(bench, name, check, unusable)
            verdicts.append(verdict)
            told(verdict)
    except BaseException:
        if begun:
            await _give_back(bench, noted)
        raise
    finally:
        await server.close()
    return verdicts


async def _give_back(bench: Bench, noted: Callable[[str], None]) -> None:
    """Leave a server as it was found although the checks were interrupted, perhaps amid a pause or a sync."""
    limit = bench.settings.limit_seconds if bench.touched else bench.settings.answer_seconds
    noted(f"interrupted: the server is left as it was found, within {limit:g} s; once more leaves it as it is now")
    try:
        async with asyncio.timeout(limit):
            with suppress(Failed):  # it has none of it, and was not paused by us
                await bench.server.resume()
            await restored(bench)
    except (Failed, HeadwayError) as failure:
        noted(f"the server is not as it was found: {failure}")
    except TimeoutError:
        noted(f"the server is not as it was found: it did not answer within {limit:g} s")
    except BaseException:
        noted(
            "the server may be paused now, with weights and a label that are not its own: start it anew"
            if bench.touched
            else f"the server may be paused now: POST {bench.server.resume_path} resumes it"
        )
        raise


async def judged(bench: Bench, name: str, check: Check, unusable: Unusable | None = None) -> Verdict:
    """Return what a check comes to: `unusable` is why none can be made; one that missed what it was to meet in flight is tried again."""
    proves = (check.__doc__ or "").partition("\n")[0]
    if unusable is not None:
        wrong = name == "health"
        return Verdict(name, proves, "failed" if wrong else "skipped", unusable.wrong if wrong else unusable.why)
    bench.check = name
    for _ in range(_TRIES - 1):
        with suppress(Missed):
            return await _once(bench, name, check, proves)
    try:
        return await _once(bench, name, check, proves)
    except Missed as reason:
        return Verdict(name, proves, "skipped", str(reason))


async def _once(bench: Bench, name: str, check: Check, proves: str) -> Verdict:
    try:
        async with asyncio.timeout(bench.settings.limit_seconds):
            return Verdict(name, proves, "passed", await check(bench))
    except Missed:
        raise
    except Skipped as reason:
        return Verdict(name, proves, "skipped", str(reason))
    except (Failed, HeadwayError) as failure:
        return Verdict(name, proves, "failed", str(failure))
    except TimeoutError:
        with suppress(Failed, HeadwayError, TimeoutError):  # the check may have paused it
            async with asyncio.timeout(bench.settings.answer_seconds):
                await bench.server.resume()
        return Verdict(name, proves, "failed", f"not over within {bench.settings.limit_seconds:g} s")
