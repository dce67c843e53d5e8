"""A scenario: the world and the knobs of a run that is simulated or planned, as TOML writes it (`headway simulate`, `headway plan`).

[rollout] is the section of a real config, key for key. The other sections say what the world is like in the terms of who measures it:
tokens of a rollout, tokens a second of an engine, seconds of a trainer step. A number stands for a distribution that is always that number.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from headway.settings import RolloutSection
from headway.settings.section import NotNegative, NotNegativeInt, Section
from headway.sim.distributions import Fixed, Given
from headway.types import Cause

Share = Annotated[float, Meta(ge=0, le=1)]
OneOrMore = Annotated[int, Meta(ge=1)]
Drawn: TypeAlias = NotNegative | Given
"""A number, or a table like `{kind = "lognormal", mean = 30, sigma = 1}`."""


def drawn(value: Drawn) -> Given:
    """Return the distribution that a key means."""
    return Fixed(float(value)) if isinstance(value, int | float) else value


class Failing(Section, frozen=True, kw_only=True):
    """A way in which attempts fail, at a time that is uniform over the attempt."""

    cause: Annotated[Cause, Meta(description="What the attempt is lost to.", examples=["environment_error"])]
    share: Annotated[Share, Meta(description="Share of the attempts that fail so.", examples=[0.02])]
    retried: Annotated[bool, Meta(description="Whether the member is tried again, up to rollout.max_attempts.")] = True


class WorkloadSection(Section, frozen=True, kw_only=True):
    """What rollouts are like. Exactly one of `tokens` and `seconds`."""

    tokens: Annotated[Drawn | None, Meta(description="Tokens that the policy writes in a rollout, over all its turns.")] = None
    seconds: Annotated[
        Drawn | None,
        Meta(description="Instead of tokens: seconds that an engine writes on a rollout when it is as fast as fleet.tokens_per_second."),
    ] = None
    prompt_tokens: Annotated[Drawn, Meta(description="Tokens of the prompt: they are prefilled, and take room in the KV cache.")] = 256.0
    turns: Annotated[OneOrMore, Meta(description="Turns of a rollout; its tokens are spread evenly over them.")] = 1
    tool_seconds: Annotated[Drawn, Meta(description="Between two turns: how long the environment takes, seconds.")] = 0.0
    observed_tokens: Annotated[NotNegativeInt, Meta(description="Between two turns: tokens that the environment answers with.")] = 0
    score_seconds: Annotated[Drawn, Meta(description="How long a scorer takes for a whole group; 0: rollouts bring their reward.")] = 0.0
    zero_advantage_share: Annotated[Share, Meta(description="Share of the prompts whose rollouts all score alike.")] = 0.0
    filtered_share: Annotated[
        Share, Meta(description="Share of the groups that a rollout.filter would refuse, once they are complete.")
    ] = 0.0
    failures: Annotated[tuple[Failing, ...], Meta(description="Ways in which attempts fail.")] = ()


class FleetSection(Section, frozen=True, kw_only=True):
    """The inference engines, all alike.

    n sequences that decode at once get tokens_per_second / (1 + n / half_speed_at) each: an engine writes at most
    tokens_per_second x half_speed_at tokens a second in all.
    """

    engines: Annotated[OneOrMore, Meta(description="How many engines.")] = 1
    tokens_per_second: Annotated[float, Meta(gt=0, description="Tokens a second of one sequence that decodes alone.")] = 50.0
    half_speed_at: Annotated[NotNegative, Meta(description="Sequences at which each is half as fast as alone; 0: never slower.")] = 0.0
    prefill_tokens_per_second: Annotated[
        NotNegative, Meta(description="Tokens a second of prefill; decoding stands still meanwhile. 0: takes no time.")
    ] = 0.0
    max_sequences: Annotated[NotNegativeInt, Meta(description="Sequences in an engine's batch at most; more wait. 0: no limit.")] = 0
    kv_tokens: Annotated[
        NotNegativeInt,
        Meta(description="Tokens that an engine's KV cache holds; when full, the youngest sequence is put back. 0: no limit."),
    ] = 0
    sync_seconds: Annotated[Drawn, Meta(description="Pause of an engine for a weight sync, seconds.")] = 0.0
    weight_sync: Annotated[Literal["in_flight", "wait", "abort_resume"], Meta(description="As engine.weight_sync.")] = "in_flight"
    recompute_kv: Annotated[bool, Meta(description="As engine.recompute_kv: what is in flight is prefilled again after a sync.")] = True
    sync_order: Annotated[Literal["all_at_once", "rolling"], Meta(description="As engine.sync_order.")] = "all_at_once"
    on_lost: Annotated[Literal["continue", "restart"], Meta(description="As engine.on_lost.")] = "continue"


class TrainingSection(Section, frozen=True, kw_only=True):
    """The trainer: a batch takes (seconds + its tokens / tokens_per_second) x jitter."""

    seconds: Annotated[Drawn, Meta(description="Seconds of a batch, whatever its size.")] = 0.0
    tokens_per_second: Annotated[
        NotNegative, Meta(description="Tokens a second (prompts, observations and masked tokens included); 0: size does not matter.")
    ] = 0.0
    jitter: Annotated[NotNegative, Meta(description="Standard deviation of the logarithm of a factor with mean 1.")] = 0.0


class LengthSection(Section, frozen=True, kw_only=True):
    """How long is simulated."""

    steps: Annotated[OneOrMore, Meta(description="Batches that are trained.")] = 200
    warm_up: Annotated[NotNegativeInt | None, Meta(description="The first batches, of which figures tell nothing. Unset: a tenth.")] = None
    seed: Annotated[NotNegativeInt, Meta(description="The same seed, the same result.")] = 0


class EvaluationSection(Section, frozen=True, kw_only=True):
    """Load by evaluations."""

    every: Annotated[OneOrMore, Meta(description="As eval.every.")] = 25
    prompts: Annotated[OneOrMore, Meta(description="How many prompts.", examples=[64])]
    n: Annotated[OneOrMore, Meta(description="As eval.n.")] = 1
    hold_seconds: Annotated[NotNegative, Meta(description="As eval.hold_seconds.")] = 30.0
    at_start: Annotated[bool, Meta(description="As eval.at_start.")] = False


class Fault(Section, frozen=True, kw_only=True):
    """One [[faults]]: at a time something goes wrong."""

    at_seconds: Annotated[NotNegative, Meta(description="When, virtual seconds from the start of the run.", examples=[600])]
    what: Annotated[
        Literal["engine_dies", "trainer_stalls", "trainer_dies", "orchestrator_dies"],
        Meta(
            description="What goes wrong. A dead engine, trainer or orchestrator is started again after `for_seconds`.",
            examples=["engine_dies"],
        ),
    ]
    for_seconds: Annotated[float, Meta(gt=0, description="How long it is away, or stalls.")] = 60.0
    engine: Annotated[NotNegativeInt, Meta(description="Which engine dies, from 0.")] = 0


class BudgetSection(Section, frozen=True, kw_only=True):
    """What a plan may spend, and what it aims at; `headway simulate` does not read it."""

    engines: Annotated[OneOrMore | None, Meta(description="Engines at most. Unset: fleet.engines.")] = None
    sequences_per_engine: Annotated[OneOrMore | None, Meta(description="Rollouts in flight at an engine at most. Unset: no limit.")] = None
    max_staleness: Annotated[OneOrMore, Meta(description="max_staleness at most.")] = 32
    groups_per_batch: Annotated[
        tuple[OneOrMore, ...], Meta(description="The batch sizes to choose from. Empty: rollout.groups_per_batch only.")
    ] = ()
    masked_share: Annotated[Share, Meta(description="Masked tokens at most, as a share of those sampled.")] = 0.02
    head_coverage: Annotated[Share, Meta(description="Rollouts whose first tokens are trained on, at least, as a share.")] = 0.95


class Scenario(Section, frozen=True, kw_only=True):
    """All of it."""

    workload: WorkloadSection
    training: TrainingSection
    fleet: FleetSection = FleetSection()
    rollout: RolloutSection = RolloutSection()
    run: LengthSection = LengthSection()
    eval: EvaluationSection | None = None
    faults: tuple[Fault, ...] = ()
    budget: BudgetSection = BudgetSection()


def tokens_of(scenario: Scenario) -> Given:
    """Return the distribution of the tokens that the policy writes in a rollout."""
    workload = scenario.workload
    if workload.seconds is not None:
        return drawn(workload.seconds).scaled(scenario.fleet.tokens_per_second)
    assert workload.tokens is not None  # noqa: S101  checked when a scenario is read
    return drawn(workload.tokens)


def warm_up_of(scenario: Scenario) -> int:
    """Return how many batches are not looked at: as set, otherwise a tenth; at least one is left to look at."""
    length = scenario.run
    return min(length.steps // 10 if length.warm_up is None else length.warm_up, length.steps - 1)
