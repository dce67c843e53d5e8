"""The user's environment with faults around it: what workers of a chaos run import as `headway.testing.chaos.wrapped:attempt`.

Which environment it wraps, and which faults hold now, stands in the JSON file named by HEADWAY_CHAOS; it is read again when it changes, so
faults come and go while workers run. Whether an attempt is hit is told by its group, member, attempt and the plan's seed alone.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
from pathlib import Path
from typing import Any

import msgspec

from headway.entries import load_entry
from headway.protocols import Outcome, Policy
from headway.types import Prompt

VARIABLE = "HEADWAY_CHAOS"


class Weather(msgspec.Struct, frozen=True):
    """What holds now. `entry` and `base` name the environment; shares of attempts that are slower by `slow_seconds`, or raise."""

    entry: str
    base: str
    seed: int = 0
    slow_share: float = 0.0
    slow_seconds: float = 0.0
    failing_share: float = 0.0


class ChaosError(RuntimeError):
    """An attempt that fails because a chaos plan says so."""


async def attempt(prompt: Prompt, policy: Policy) -> Outcome:
    """Attempt the prompt in the wrapped environment, in today's weather."""
    weather = _weather()
    request = getattr(policy, "request", None)
    name = tuple(getattr(request, part, 0) for part in ("group", "member", "attempt"))
    chance = random.Random(f"{weather.seed} {prompt.id} {name}")  # noqa: S311 -- reproducible on purpose
    slow, failing = chance.random() < weather.slow_share, chance.random() < weather.failing_share
    if slow:
        await asyncio.sleep(weather.slow_seconds)
    if failing:
        raise ChaosError("the chaos plan lets this attempt fail")
    outcome: Outcome = await _environment(weather.entry, weather.base)(prompt, policy)
    return outcome


def _weather() -> Weather:
    path = Path(os.environ[VARIABLE])
    return _read(path, path.stat().st_mtime_ns)


@functools.lru_cache(1)
def _read(path: Path, _: int) -> Weather:
    return msgspec.json.decode(path.read_bytes(), type=Weather)


@functools.cache
def _environment(entry: str, base: str) -> Any:
    return load_entry(entry, Path(base), key="environment.entry")
