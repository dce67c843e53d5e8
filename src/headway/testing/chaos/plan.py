"""A chaos plan: which faults befall a run, when, and for how long. Read from TOML; what is not understood is refused, as in a config."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headway.errors import ConfigError

Kind = Literal["kill", "stop", "hide_weights", "delete_weights", "slow_environment", "failing_environment"]
Target = Literal["engine", "trainer", "worker", "orchestrator"]
Positive = Annotated[float, Meta(gt=0)]

_TARGETS: Mapping[str, tuple[str, ...]] = {"kill": ("engine", "trainer", "worker", "orchestrator"), "stop": ("engine", "trainer", "worker")}
_LASTING = {"stop", "hide_weights", "slow_environment", "failing_environment"}
_WHEN = ("at_seconds", "at_batch", "every_seconds")


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[fault]]`. Exactly one of `at_seconds`, `at_batch` (batch k is on disk) and `every_seconds` (give or take a half, by the seed).

    `kill` ends the target as kill -9 does; the orchestrator is then started again with --resume. `stop` halts the target for `for_seconds`.
    `hide_weights` takes the newest version away for `for_seconds`, `delete_weights` for good. For `for_seconds`, `slow_environment` makes a
    `share` of the attempts take `seconds` longer, `failing_environment` lets a `share` of them raise.
    """

    kind: Kind
    target: Target | None = None
    at_seconds: Annotated[float, Meta(ge=0)] | None = None
    at_batch: Annotated[int, Meta(ge=0)] | None = None
    every_seconds: Positive | None = None
    for_seconds: Positive = 5.0
    share: Annotated[float, Meta(gt=0, le=1)] = 0.2
    seconds: Positive = 5.0

    @property
    def name(self) -> str:
        """What is done, in words."""
        return f"{self.kind} {self.target}" if self.target else self.kind.replace("_", " ")

    @property
    def lasts(self) -> bool:
        """Whether it ends by itself after `for_seconds`."""
        return self.kind in _LASTING


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole plan. `limit_seconds`: a run that has not ended by then is stopped, and has failed; 0: no limit."""

    fault: tuple[Fault, ...]
    seed: Annotated[int, Meta(ge=0)] = 0
    limit_seconds: Annotated[float, Meta(ge=0)] = 0.0


def load_plan(path: Path) -> Plan:
    """Read a plan. Raises ConfigError with a line for each mistake."""
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML: {error}") from None
    if mistakes := [f"{path}: {mistake}" for mistake in _mistakes(table)]:
        raise ConfigError(mistakes[0], detail="\n".join(mistakes[1:]))
    return msgspec.convert(table, Plan)


def _mistakes(table: Mapping[str, Any]) -> Iterator[str]:
    yield from _unknown(table, Plan, "")
    faults = table.get("fault")
    if not isinstance(faults, list) or not faults:
        yield "it plans no fault: add a [[fault]]"
        return
    for number, fault in enumerate(faults, 1):
        where = f"fault {number}: "
        if not isinstance(fault, dict):
            yield f"{where}must be a table: write it under [[fault]]"
            continue
        if unknown := list(_unknown(fault, Fault, where)):
            yield from unknown
            continue
        try:
            yield from (where + problem for problem in _contradictions(msgspec.convert(fault, Fault), fault))
        except msgspec.ValidationError as error:
            yield where + str(error).replace(" - at `$.", ": at `")
    try:
        msgspec.convert({name: value for name, value in table.items() if name in {"seed", "limit_seconds"}} | {"fault": []}, Plan)
    except msgspec.ValidationError as error:
        yield str(error).replace(" - at `$.", ": at `")


def _contradictions(fault: Fault, given: Mapping[str, Any]) -> Iterator[str]:
    allowed = _TARGETS.get(fault.kind, ())
    if allowed and fault.target not in allowed:
        yield f'target is "{fault.target or ""}": kind = "{fault.kind}" needs one of {", ".join(allowed)}'
    if not allowed and fault.target is not None:
        yield f'target: kind = "{fault.kind}" has none: remove it'
    when = [name for name in _WHEN if name in given]
    if len(when) != 1:
        yield f"{' and '.join(when) or 'no time'} given: give exactly one of {', '.join(_WHEN)}"
    of_environment = fault.kind in {"slow_environment", "failing_environment"}
    for name, fits in (("for_seconds", fault.lasts), ("share", of_environment), ("seconds", fault.kind == "slow_environment")):
        if name in given and not fits:
            yield f'{name}: kind = "{fault.kind}" does not use it: remove it'
    if fault.every_seconds is not None and fault.lasts and fault.for_seconds > fault.every_seconds / 2:
        yield f"for_seconds is {fault.for_seconds:g}: at most half of every_seconds ({fault.every_seconds:g})"


def _unknown(table: Mapping[str, Any], kind: type[msgspec.Struct], where: str) -> Iterator[str]:
    known = kind.__struct_fields__
    for name in table:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            yield f"{where}{name}: no such key" + (f": did you mean {near[0]}?" if near else f": known are {', '.join(known)}")
