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
_NOT_FOUND = 404

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
        unusable = await _begin(bench)
        for name, check in CHECKS.items():
            verdict = await _judge(bench, name, check, unusable)
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


async def _begin(bench: Bench) -> tuple[str, str]:
    """Ask what every check needs to know. Returns what is wrong with the server and why it is asked nothing else; "" and "": go on."""
    try:
        async with asyncio.timeout(bench.settings.answer_seconds):
            await bench.server.find_route()
            bench.label = await bench.server.label()
    except TimeoutError:
        return f"no answer within {bench.settings.answer_seconds:g} s", "the server does not answer"
    except Failed as failure:
        return await _why_unusable(bench, str(failure))
    return "", ""


async def _why_unusable(bench: Bench, failed: str) -> tuple[str, str]:
    """Tell a server that lacks a route, which is for the checks to say, from none, and from one that is no engine: it has no /health."""
    try:
        async with asyncio.timeout(bench.settings.answer_seconds):
            health = await bench.server.call("GET", "/health")
    except TimeoutError:
        return f"GET /health: no answer within {bench.settings.answer_seconds:g} s", "the server does not answer"
    except Failed:
        return failed, "the server cannot be reached"
    if health.status == _NOT_FOUND:
        return f"GET /health answered {_NOT_FOUND}: a web server, and no inference engine", "the server is no inference engine"
    return "", ""


async def _judge(bench: Bench, name: str, check: Check, unusable: tuple[str, str]) -> Verdict:
    proves = (check.__doc__ or "").partition("\n")[0]
    wrong, why = unusable
    if wrong:
        return Verdict(name, proves, "failed", wrong) if name == "health" else Verdict(name, proves, "skipped", why)
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
