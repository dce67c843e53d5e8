"""The section [run]: what a run is called, where it lives, when and how it ends, and how much of it is kept."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headway.settings.section import Section


class FinishWhen(Section, frozen=True, kw_only=True):
    """End the run early, once the policy is good enough."""

    reward_above: Annotated[float, Meta(description="End when the mean reward of the last batches is above this.", examples=[0.97])]
    over_batches: Annotated[int, Meta(ge=1, le=1000, description="How many batches the mean is taken over.")] = 20


class RunSection(Section, frozen=True, kw_only=True):
    """What this run is called, where it lives, and when it ends."""

    name: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run; part of its directory.", examples=["guess-2"])
    ] = "run"
    seed: Annotated[int, Meta(ge=0, description="Seed of everything random: prompt order, sampling, initial weights.")] = 0
    steps: Annotated[int, Meta(ge=1, description="Trainer steps (= batches) after which the run drains and ends.")] = 1000
    directory: Annotated[
        str, Meta(description="Run directory; `{name}` is replaced. Relative to where headway is started. May be on a shared file system.")
    ] = "runs/{name}"
    state_directory: Annotated[
        str, Meta(description="Journal and payloads: local disk; `{name}` is replaced. Empty: `state/` inside the run directory.")
    ] = ""
    finish_when: Annotated[FinishWhen | None, Meta(description="Early end by reward: `{reward_above = 0.97, over_batches = 20}`.")] = None
    drain_timeout_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="How long the end of a run may take: rollouts in flight (half of it), training what is formed, the final eval. "
            "What is not done by then is cancelled; user code then has environment.cleanup_seconds.",
        ),
    ] = 120.0
    shutdown_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="How long workers, engines and the trainer get to close once the run's end is on disk. What hangs longer is killed, and named.",
        ),
    ] = 30.0
    stop_before_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="Wall-time limit of this process: the run drains in time to be saved before so many seconds have passed, and ends with exit "
            "code 143, to be taken up again with --resume. 0: none.",
        ),
    ] = 0.0
    stall_seconds: Annotated[
        float,
        Meta(ge=0, description="Report a stall, with the stage that is blocked, when nothing has happened for so long. 0: never."),
    ] = 1800.0
    on_stall: Annotated[
        Literal["report", "exit"], Meta(description="What a stall leads to: a report in the log, or also the end of the run (exit code 3).")
    ] = "report"
    keep_payloads: Annotated[
        int,
        Meta(
            ge=1,
            description="Batches whose rollouts stay in the journal once they are trained: a resume can go back by as many, 16 at most.",
        ),
    ] = 16
    keep_batches: Annotated[int, Meta(ge=0, description="Batch directories kept once they are trained, the newest; 0: all.")] = 0
    min_free_bytes: Annotated[
        int,
        Meta(ge=0, description="Start no further group while a disk that the run writes to has less than this free; it goes on by itself."),
    ] = 256 * 1024**2
    max_empty_batches: Annotated[
        int,
        Meta(
            ge=1,
            description="End the run with an error after this many empty batches in a row (groups_per_batch groups of which none can train).",
        ),
    ] = 5
    max_consecutive_failures: Annotated[
        int, Meta(ge=0, description="End the run with an error after this many failed attempts in a row; 0: never.")
    ] = 100
    max_uncovered_batches: Annotated[
        int,
        Meta(
            ge=0,
            description="End the run with an error when, for so many batches in a row, no rollout of an environment (or of one tenth of its rollouts "
            "by length) had its first tokens trained on: a kind that is always too late is never learned from. 0: never.",
        ),
    ] = 20
