"""The weights of a server that is only visited: changed by headway's own administration, and given back as they were found."""

from __future__ import annotations

from headway.errors import HeadwayError
from headway.protocols import Engine
from headway.settings import EngineSection
from headway.testing.conformance.bench import Bench
from headway.testing.conformance.verdicts import Failed, expect
from headway.types import Checkpoint

LINEAGE = "conformance"
_FOUND = 7  # prompts by whose continuations the weights are known again; half precision may break a tie otherwise


def administer(bench: Bench, mode: str) -> Engine:
    """Return the administrative side of the server, which syncs as `mode` says; close it."""
    from headway.adapters.engines import admin_of

    settings = EngineSection(
        urls=(bench.server.address.url,),
        launch="none",
        weight_sync=mode,  # type: ignore[arg-type]  # one of three
        request_timeout_seconds=bench.settings.call_seconds,
    )
    return admin_of("the server", bench.server.address, settings)


async def give(bench: Bench, engine: Engine, checkpoint: Checkpoint) -> None:
    """Let the server take a checkpoint. Raises `Failed`; the server is not left paused."""
    if not bench.touched:
        prompts = [bench.prompt() for _ in range(_FOUND)]
        bench.found = [(prompt, await _continued(bench, prompt)) for prompt in prompts]
    bench.touched = True
    try:
        await engine.prepare(checkpoint)
        await engine.transfer(checkpoint)
        await engine.commit(checkpoint)
    except HeadwayError as error:
        await engine.abandon()
        raise Failed(f"it did not take {checkpoint.directory}: {error}") from error


async def restored(bench: Bench) -> str:
    """The server is as it was found: its weights and their label, healthy, not paused."""
    if bench.touched and bench.model is not None:
        engine = administer(bench, "in_flight")
        try:
            await give(bench, engine, Checkpoint(0, bench.label, str(bench.model)))
        finally:
            await engine.close()
        again = sum([await _continued(bench, prompt) == ids for prompt, ids in bench.found])
        expect(
            2 * again > len(bench.found),
            f"it served other weights than those of {bench.model} before: it serves those of --model now, under the label of before",
        )
    if bench.label:
        told = await bench.server.label()
        expect(told == bench.label, f'it serves "{told}", and served "{bench.label}" before')
    expect(await bench.server.is_paused() is not True, "it is paused")
    await bench.server.generate(bench.name(), bench.prompt(), max_tokens=2)
    return ""


async def _continued(bench: Bench, prompt: list[int]) -> list[int]:
    return (await bench.server.generate(bench.name(), prompt, max_tokens=1, temperature=0.0)).ids
