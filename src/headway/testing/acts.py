"""What the fake environment is told to do: faults, turns, attempts, rules that hand them out, and the whole as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from headway.testing.rules import Firing

VARIABLE = "HEADWAY_FAKE_ENVIRONMENT"
NotNegative = Annotated[float, Meta(ge=0)]


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Something that user code does at one place; all unset: nothing.

    In this order: `spawn` starts a command and leaves it running; `seconds` passes, `block_seconds` blocks the process (as native code
    does), `spin_seconds` burns it; `error` is raised; `exit` ends the process with that code, `kill` as kill -9 does; `cancel` raises
    CancelledError; `hang` never ends; `alarm` installs an alarm signal.
    """

    spawn: tuple[str, ...] = ()
    seconds: NotNegative = 0.0
    block_seconds: NotNegative = 0.0
    spin_seconds: NotNegative = 0.0
    alarm: bool = False
    error: str = ""
    exit: int | None = None
    kill: bool = False
    cancel: bool = False
    hang: bool = False


class Turn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn: `fault`, then a generation (`generate` false: none), then `observe` (text or ids) is appended.

    `tool`: the policy's text is read as JSON; where it is none, `tool_error` is observed instead.
    """

    fault: Fault = Fault()
    generate: bool = True
    max_tokens: int | None = None
    observe: str | tuple[int, ...] = ""
    tool: bool = False
    tool_error: str = "error"


class Act(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One attempt: a conversation of `turns` that begins with `open`; `conversations` of them one after the other.

    `reward`: a number, null or a boolean as they are; "sampled": told by the sampled ids (the default; it varies); "nan", "inf", "-inf" are
    these numbers; any other text is returned as text. `fault` comes before the first turn, `after` behind the last.

    When it ends: `close_seconds` of clean-up (also when it is cancelled), `close_hang`: a clean-up that never ends. Of a scorer only
    `fault`, `reward` and `rewards` are looked at.
    """

    open: str | tuple[int, ...] | None = None
    turns: tuple[Turn, ...] = (Turn(),)
    conversations: int = 1
    reward: float | bool | str | None = "sampled"
    rewards: dict[str, float] = {}
    fault: Fault = Fault()
    after: Fault = Fault()
    close_seconds: NotNegative = 0.0
    close_hang: bool = False


class EnvironmentRule(Firing, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`do` this in attempts that `match`: by `prompt`, `purpose`, `group`, `member`, `attempt`, `epoch`, `what` (attempt, score)."""

    do: Act = Act()


class EnvironmentScript(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The whole environment. A rule that matches on no `what` is for attempts. `prompts`: how many there are, named p0000, p0001, ..."""

    rules: tuple[EnvironmentRule, ...] = ()
    default: Act = Act()
    default_score: Act = Act()
    prompts: int = 16
    log: str = ""

    def write(self, directory: Path, name: str = "environment") -> dict[str, str]:
        """Write the script to `directory`, its log beside it unless it names one; return the variables that runs need to use it."""
        directory.mkdir(parents=True, exist_ok=True)
        script = msgspec.structs.replace(self, log=self.log or str(directory / f"{name}.jsonl"))
        path = directory / f"{name}.script.json"
        path.write_bytes(msgspec.json.encode(script))
        return {VARIABLE: str(path.absolute())}
