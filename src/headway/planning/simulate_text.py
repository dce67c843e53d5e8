"""The report of a simulation as plain text for a terminal of 80 columns: ASCII, so that any terminal and any log can show it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap

from headway.reports.plain_text import percent, staleness_histogram
from headway.rules.waste import ROWS
from headway.settings import steps_ahead
from headway.sim.distributions import Empirical, Fixed, Given, Lognormal, Mixture, Pareto, Uniform
from headway.sim.scenario import Scenario, drawn
from headway.sim.summary import Summary

__all__ = ["duration", "in_words", "percent", "simulate_text"]

_NAME = 26
_MEANINGS = {**ROWS, "undelivered": "of attempts cut short or timed out"}


def simulate_text(name: str, scenario: Scenario, summary: Summary, assumed: Sequence[str] = ()) -> str:
    """Return the report; `name`: what the scenario is called, `assumed`: what of it was not measured."""
    parts = [
        _head(name, scenario, summary),
        _rates(summary),
        _waits(summary),
        _tokens(summary),
        _staleness(scenario, summary),
        _by_length(summary),
        *([_notes(assumed)] if assumed else []),
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def _head(name: str, scenario: Scenario, summary: Summary) -> Iterator[str]:
    rollout, workload, fleet = scenario.rollout, scenario.workload, scenario.fleet
    length = workload.tokens if workload.tokens is not None else workload.seconds
    unit = "tokens" if workload.tokens is not None else "seconds of writing"
    bound = "no bound" if rollout.on_stale == "train" else f"max_staleness {rollout.max_staleness}"
    ahead = '"auto"' if rollout.steps_ahead == "auto" else f"{steps_ahead(rollout):g}"
    size = f"{rollout.batch_tokens:,} tokens in" if rollout.batch_tokens else f"{rollout.groups_per_batch:,}"
    warm_up = scenario.run.steps - summary.batches
    after = f" after {warm_up:,} of warm-up" if warm_up > 0 else ""
    batches = f"{summary.batches:,} {'batch' if summary.batches == 1 else 'batches'}"
    yield f"{name}: {batches} in {duration(summary.seconds)} of virtual time{after} ({summary.by})"
    yield f"  rollouts of {'no length' if length is None else in_words(drawn(length))} {unit}; {_many(fleet.engines, 'engine')}"
    yield f"  batches of {size} groups x {rollout.group_size} rollouts, max_concurrent {rollout.max_concurrent:,}"
    yield f"  {bound}, steps_ahead {ahead}, on_stale {rollout.on_stale}"


def _rates(summary: Summary) -> Iterator[str]:
    yield _row("batches an hour", f"{summary.batches_per_hour:,.1f}")
    yield _row("rollouts an hour", f"{summary.rollouts_per_hour:,.0f}", "in the batches that were trained")
    yield _row("trained tokens a second", f"{summary.trained_tokens_per_second:,.0f}")
    yield _row("seconds between versions", _seconds(summary.cycle_seconds))
    yield _row("seconds of a rollout", _seconds(summary.latency_mean), "mean")
    yield _row("rollouts in flight", f"{summary.in_flight_mean:,.0f}", f"at most {summary.in_flight_max:,}")
    yield _row(
        "groups waiting, at most", f"{summary.ready_groups_max:,}", f"finished rollouts hold {_bytes(summary.waiting_bytes_max)} at most"
    )
    if summary.preemptions:
        yield _row("preemptions", f"{summary.preemptions:,}", "sequences put back: the KV cache was full")


def _waits(summary: Summary) -> Iterator[str]:
    yield _row("trainer: training", percent(summary.trainer_busy))
    yield from _causes(summary.trainer_waits)
    yield _row("engines: generating", percent(summary.engines_busy))
    yield from _causes(summary.engines_wait)
    if summary.gate_closed:
        yield _row("gate: closed", percent(sum(summary.gate_closed.values())))
        yield from _causes({f"by {reason}": share for reason, share in summary.gate_closed.items()})


def _causes(causes: Mapping[str, float]) -> Iterator[str]:
    for cause, share in causes.items():
        yield f"{percent(share):>14}  {cause}"


def _tokens(summary: Summary) -> Iterator[str]:
    tokens = summary.tokens
    yield f"{'tokens':>14}{'share':>9}"
    for row, count in {"trained": tokens.trained, "masked": tokens.masked, **tokens.lost}.items():
        yield f"{count:>14,}{percent(count / max(1, tokens.sampled)):>9}  {row.replace('_', ' ')}: {_MEANINGS.get(row, '')}"
    yield f"{tokens.sampled:>14,}{'':9}  in all, of which the fate is decided"


def _staleness(scenario: Scenario, summary: Summary) -> Iterator[str]:
    figures, bound, masks = summary.staleness, scenario.rollout.max_staleness, scenario.rollout.on_stale == "mask"
    yield from staleness_histogram(figures.histogram, figures.masked_histogram, bound, masks=masks)
    yield ""
    yield f"{'staleness in versions':28}{'mean':>8}{'p99':>8}{'max':>8}"
    yield f"{'trained tokens':28}{figures.mean:>8.2f}{figures.p99:>8}{figures.max:>8}"
    yield f"{'heads of trained rollouts':28}{figures.head_mean:>8.2f}{figures.head_p99:>8}{figures.head_max:>8}"
    yield f"masked as too old: {percent(summary.masked_share)} of the tokens in batches"
    yield f"head coverage (rollouts whose first token trains): {percent(summary.head_coverage)}"


def _by_length(summary: Summary) -> Iterator[str]:
    bias = summary.length_bias
    yield "finished rollouts by length, a tenth each, shortest first"
    yield f"{'tokens of one':16}" + "".join(f"{_short(tokens):>6}" for tokens in bias.tokens)
    yield f"{'trained, %':16}" + "".join(f"{100 * share:6.0f}" for share in bias.trained_share)
    yield f"{'head trained, %':16}" + "".join(f"{100 * share:6.0f}" for share in bias.head_coverage)


def _notes(assumed: Sequence[str]) -> Iterator[str]:
    for note in assumed:
        yield from wrap(f"assumed: {note}", 80, subsequent_indent="    ")


def _row(name: str, value: str, note: str = "") -> str:
    return f"{name:{_NAME}}{value:>10}  {note}".rstrip()


def in_words(distribution: Given) -> str:
    """Return a distribution as a sentence has it: "800 (lognormal, sigma 1)"."""
    mean = f"{distribution.mean:,.4g}" if distribution.mean < 1000 else f"{distribution.mean:,.0f}"
    match distribution:
        case Fixed():
            return mean
        case Uniform():
            return f"{distribution.low:,g} to {distribution.high:,g}"
        case Lognormal():
            return f"{mean} (lognormal, sigma {distribution.sigma:g})"
        case Pareto():
            return f"{mean} (Pareto, shape {distribution.shape:g})"
        case Empirical():
            return f"{mean} ({len(distribution.values):,} measured values)"
        case Mixture():
            return f"{mean} (a mixture of {len(distribution.parts)})"


def duration(seconds: float) -> str:
    """Return seconds as people say them: "38.2 s", "41 min", "2.3 h", "3.1 days"."""
    if seconds < 120:
        return f"{_seconds(seconds)} s"
    for unit, size, most in (("min", 60, 7200), ("h", 3600, 48 * 3600)):
        if seconds < most:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 86400:.1f} days"


def _seconds(value: float) -> str:
    """Return seconds to a tenth; where that says little, to three figures."""
    if value >= 10 or round(value, 1) == value:
        return f"{value:,.1f}"
    return f"{value:.3g}" if value >= 0.001 else "<0.001"


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} bytes"


def _short(number: float) -> str:
    if number >= 99_950:
        return f"{number / 1000:.0f}k"
    return f"{number / 1000:.1f}k" if number >= 9_995 else f"{number:.0f}"
