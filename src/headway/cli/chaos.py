"""`headway chaos`: a run under the faults of a plan, told as they happen, and the verdict."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from headway.cli.streams import say
from headway.testing.chaos import Chaos, Verdict, load_plan


def play_chaos(config: Path, plan: Path, *, overrides: Sequence[str], name: str | None) -> int:
    """Play and print; returns 0 for a run that reached its end and broke nothing, otherwise 1."""

    def tell(line: str) -> None:
        with suppress(OSError):
            print(f"chaos: {line}", file=sys.stderr, flush=True)

    verdict = Chaos(config, load_plan(plan), overrides=overrides, name=name, say=tell).play()
    say(text_of(verdict))
    return 0 if verdict.is_clean else 1


def text_of(verdict: Verdict) -> str:
    """Return the verdict for people: what was done, what is broken, how the run ended."""
    lines = [f"{len(verdict.done)} things were done to {verdict.directory}:", *(f"  {line}" for line in verdict.done)]
    if verdict.not_reached:
        lines.append("the run had ended before: " + "; ".join(verdict.not_reached))
    lines += [f"  {violation}" for violation in verdict.violations]
    broken = sorted({violation.invariant for violation in verdict.violations})
    if broken:
        lines.append(f"broken: invariant {', '.join(map(str, broken))}")
    elif verdict.exit_code == 0 and not verdict.timed_out:
        lines.append("clean: the run reached its end, and all ten invariants hold")
    if verdict.timed_out:
        lines.append("the run did not end within the plan's limit_seconds")
    elif verdict.exit_code != 0:
        lines.append(f"the run failed, exit code {verdict.exit_code}: its own last line says why")
    return "\n".join(lines)
