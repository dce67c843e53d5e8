"""Runs the checks one after the other, each within its limit, and leaves the server as it was found."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from headway.errors import HeadwayError
from headway.testing.conformance import adapter_check, flight_checks, generation_checks, weight_checks
from headway.testing.conformance.bench import Bench, ConformanceSettings
from headway.testing.conformance.server import Server
from headway.testing.conformance.verdicts import Failed, Skipped, Verdict
from headway.testing.conformance.visiting import restored
from headway.types import EngineAddress

Check = Callable[[Bench], Awaitable[str]]
_DEFAULT = ConformanceSettings()

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
) -> list[Verdict]:
    """Check a server; returns a verdict per check, and tells each as it falls.

    `model`: directory of the checkpoint that it serves, `other`: one of the same shapes; without both no weights are changed. `adapter`: a
    LoRA adapter of the model. Paths must be readable by the server. Afterwards it serves `model` under the label that it had, unpaused.
    """
    server = Server(address)
    bench = Bench(server, settings, model=model, other=other, adapter=adapter)
    verdicts: list[Verdict] = []
    try:
        unreachable = await _begin(bench)
        for name, check in CHECKS.items():
            verdict = await _judge(bench, name, check, unreachable)
            verdicts.append(verdict)
            told(verdict)
    except BaseException:  # interrupted: the server is given back all the same
        with suppress(Failed, HeadwayError, TimeoutError):
            async with asyncio.timeout(settings.limit_seconds):
                await restored(bench)
        raise
    finally:
        await server.close()
    return verdicts


async def _begin(bench: Bench) -> str:
    """Ask what every check needs to know; returns why there is nobody to ask, if so."""
    try:
        await bench.server.find_route()
        bench.label = await bench.server.label()
    except Failed as failure:
        try:
            await bench.server.call("GET", "/health")
        except Failed:
            return str(failure)
    return ""


async def _judge(bench: Bench, name: str, check: Check, unreachable: str) -> Verdict:
    proves = (check.__doc__ or "").partition("\n")[0]
    if unreachable:
        if name == "health":
            return Verdict(name, proves, "failed", unreachable)
        return Verdict(name, proves, "skipped", "the server cannot be reached")
    bench.check = name
    try:
        async with asyncio.timeout(bench.settings.limit_seconds):
            return Verdict(name, proves, "passed", await check(bench))
    except Skipped as reason:
        return Verdict(name, proves, "skipped", str(reason))
    except (Failed, HeadwayError) as failure:
        return Verdict(name, proves, "failed", str(failure))
    except TimeoutError:
        return Verdict(name, proves, "failed", f"not over within {bench.settings.limit_seconds:g} s")
