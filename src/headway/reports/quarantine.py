"""Prompts that are never tried again, why, and what their groups were lost to; and those on the way there: by the journal."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from headway.events import Admitted, AnyEvent, GroupDropped, PromptDropped, Ready, RolloutDropped
from headway.reports.run_files import RunFiles, sane


class GivenUpPrompt(msgspec.Struct, frozen=True):
    """A prompt that was given up: for ever (`quarantined`), or in one epoch because the source no longer has it (`missing`).

    `failures`: groups of it in a row that lost too many members. `lost_to`: members of all its groups that were lost for good, by cause;
    `last_loss`: the latest, with the first line of what is known of it. `time`: Unix seconds.
    """

    prompt_id: str
    epoch: int
    cause: str
    detail: str
    failures: int
    lost_to: dict[str, int]
    last_loss: str
    time: float


class QuarantineReport(msgspec.Struct, frozen=True):
    """`headway inspect RUN quarantine`. `failing`: failed groups in a row, by prompts that are tried again; most first."""

    run: str
    ended: bool
    quarantined: list[GivenUpPrompt]
    missing: list[GivenUpPrompt]
    failing: dict[str, int]


@dataclass(slots=True)
class _Books:
    given_up: list[GivenUpPrompt] = field(default_factory=list)
    failing: Counter[str] = field(default_factory=Counter)
    prompts: dict[int, str] = field(default_factory=dict)  # of groups that have not ended
    lost: dict[str, Counter[str]] = field(default_factory=dict)
    last: dict[str, str] = field(default_factory=dict)

    def apply(self, event: AnyEvent) -> None:
        match event:
            case Admitted():
                self.prompts[event.group] = event.prompt_id
            case RolloutDropped(final=True) if event.group in self.prompts:
                prompt = self.prompts[event.group]
                self.lost.setdefault(prompt, Counter())[event.cause] += 1
                self.last[prompt] = f"{event.cause}: {event.detail.partition(chr(10))[0]}"
            case Ready() if event.group in self.prompts:
                self._forget(self.prompts[event.group])
            case GroupDropped() if event.group in self.prompts:
                prompt = self.prompts.pop(event.group)
                self.failing[prompt] += event.cause == "incomplete"
            case PromptDropped():
                self._given_up(event)
            case _:
                pass  # tells nothing of a prompt that fails

    def _forget(self, prompt: str) -> None:
        self.failing.pop(prompt, None)
        self.lost.pop(prompt, None)
        self.last.pop(prompt, None)

    def _given_up(self, event: PromptDropped) -> None:
        lost_to = dict(self.lost.get(event.prompt_id, Counter()).most_common())
        last = self.last.get(event.prompt_id, "")
        self.given_up.append(
            GivenUpPrompt(event.prompt_id, event.epoch, event.cause, event.detail, event.failures, lost_to, last, event.time)
        )
        self._forget(event.prompt_id)


def quarantine_report(run: RunFiles) -> QuarantineReport:
    """Read the report; raises StorageError when the journal is damaged."""
    books = _Books()
    with sane(run.state):
        for event in run.events():
            books.apply(event)
    return QuarantineReport(
        run=run.name,
        ended=run.info.ended is not None,
        quarantined=[prompt for prompt in books.given_up if prompt.cause == "quarantined"],
        missing=[prompt for prompt in books.given_up if prompt.cause == "missing"],
        failing=dict((+books.failing).most_common()),
    )
