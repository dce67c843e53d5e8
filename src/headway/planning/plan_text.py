"""A plan, or a judgement of a config, as plain text for a terminal of 96 columns: ASCII, so that any terminal and any log can show it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from textwrap import wrap

from headway.config.toml import toml_value
from headway.planning.advice import Choice, Plan
from headway.planning.expected import Expected
from headway.planning.judge import Judgement, Verdict
from headway.planning.sensitivity import Turned
from headway.planning.simulate_text import duration, in_words, percent
from headway.planning.words import rate_text
from headway.sim.scenario import Scenario, drawn
from headway.sim.summary import Summary

COLUMNS = 96
_KEYS = ("max_staleness", "steps_ahead", "groups_per_batch", "batch_tokens", "group_size", "max_concurrent", "on_stale")
_NAME = 22


def plan_text(name: str, scenario: Scenario, plan: Plan, assumed: Sequence[str] = ()) -> str:
    """Return the plan; `name`: what it is for, `assumed`: what was not measured."""
    engines = plan.choice.engines
    available = scenario.budget.engines or scenario.fleet.engines
    parts = [
        _head(f"plan for {name}", scenario, plan.expected),
        _section(plan.choice, f"{_many(engines)} of {available}" if engines < available else _many(engines)),
        _wrapped(plan.binding),
        _figures(scenario, plan.expected, plan.simulated),
        _agreement(plan.simulated, plan.disagreements),
        _list("tried and given up, by simulation:", plan.tried),
        _list("also:", [*plan.notes, *(f"assumed: {note}" for note in assumed)]),
        _table(plan.sensitivity),
    ]
    return _joined(parts)


def judgement_text(name: str, scenario: Scenario, judgement: Judgement, assumed: Sequence[str] = ()) -> str:
    """Return the judgement of a config; `name`: which, `assumed`: what was not measured."""
    parts = [
        _head(f"{name}, as it stands", scenario, judgement.expected),
        _section(judgement.choice, _many(judgement.choice.engines)),
        _wrapped(judgement.binding),
        _figures(scenario, judgement.expected, judgement.simulated),
        _agreement(judgement.simulated, judgement.disagreements),
        _verdicts(judgement),
        _list("also:", [*judgement.notes, *(f"assumed: {note}" for note in assumed)]),
        _table(judgement.sensitivity),
    ]
    return _joined(parts)


def _joined(parts: Iterable[Iterable[str]]) -> str:
    texts = ["\n".join(part) for part in parts]
    return "\n\n".join(text for text in texts if text).encode("ascii", "backslashreplace").decode()


def _head(title: str, scenario: Scenario, expected: Expected) -> Iterator[str]:
    workload = scenario.workload
    length = workload.tokens if workload.tokens is not None else workload.seconds
    unit = "tokens" if workload.tokens is not None else "seconds of writing"
    words = "no length" if length is None else in_words(drawn(length))
    yield title
    yield f"  rollouts of {words} {unit} take {duration(expected.rollout_seconds)}, groups {duration(expected.group_seconds)}"
    yield f"  a batch trains in {duration(expected.train_seconds)}"


def _section(choice: Choice, engines: str) -> Iterator[str]:
    yield "[rollout]"
    for key in _KEYS:
        if key == ("groups_per_batch" if choice.batch_tokens else "batch_tokens"):
            continue
        yield f"{key} = {_value(getattr(choice, key))}"
    yield f"# and {engines}"


def _value(value: float | str) -> str:
    return f"{value:g}" if isinstance(value, float) else toml_value(value)


def _figures(scenario: Scenario, expected: Expected, summary: Summary | None) -> Iterator[str]:
    budget, masks = scenario.budget, scenario.rollout.on_stale == "mask"
    yield _row("", "by formula", f"simulated ({summary.by}, {summary.batches:,} batches)" if summary else "")
    found = summary.tokens if summary else None
    rows = (
        ("batches/hour", rate_text(expected.batches_per_hour), summary and rate_text(summary.batches_per_hour), ""),
        ("trainer busy", percent(expected.trainer_busy), summary and percent(summary.trainer_busy), ""),
        ("mean staleness", f"{expected.mean_staleness:.2f}", summary and f"{summary.staleness.mean:.2f}", ""),
        ("max staleness", f"{expected.max_staleness}", summary and f"{summary.staleness.max}", ""),
        (
            "masked tokens",
            percent(expected.masked_share),
            summary and percent(summary.masked_share),
            f"aim: {_aim(budget.masked_share)} at most" if masks else "",
        ),
        (
            "head coverage",
            percent(expected.head_coverage),
            summary and percent(summary.head_coverage),
            f"aim: {_aim(budget.head_coverage)} at least" if masks else "",
        ),
        ("waste", percent(expected.waste), found and percent(1 - found.trained / max(1, found.sampled)), ""),
        ("trained tokens/s", rate_text(expected.trained_tokens_per_second), summary and rate_text(summary.trained_tokens_per_second), ""),
        ("rollouts in flight", f"{expected.in_flight:,.0f}", summary and f"{summary.in_flight_mean:,.0f}", ""),
    )
    for name, formula, simulated, aim in rows:
        yield _row(name, formula, f"{simulated or '':>10}   {aim}")


def _row(name: str, formula: str, rest: str) -> str:
    return f"{name:{_NAME}}{formula:>10}   {rest}".rstrip()


def _aim(share: float) -> str:
    return f"{100 * share:.4g}%"


def _agreement(summary: Summary | None, lines: Sequence[str]) -> Iterator[str]:
    if summary is None:
        return
    if not lines:
        yield "formulas and simulation agree"
        return
    yield "formulas and simulation DISAGREE; believe the simulation:"
    for line in lines:
        yield from _wrapped(line, 2)


def _verdicts(judgement: Judgement) -> Iterator[str]:
    met = "the aims are met" if judgement.aims_met else "the aims are NOT met"
    if not judgement.verdicts:
        yield f"{met}; nothing to change"
        return
    yield f"{met}; what to change, one after the other:"
    for verdict in judgement.verdicts:
        yield from _wrapped(f"{_turn(verdict)}  {verdict.words}", 2, 4)
    yield from _wrapped(f"all of it: {judgement.changes}", 2, 4)


def _turn(verdict: Verdict) -> str:
    return f"{verdict.key} {_bare(verdict.now)} -> {_bare(verdict.better)}:" if verdict.now != verdict.better else f"{verdict.key}:"


def _bare(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _table(rows: Sequence[Turned]) -> Iterator[str]:
    if not rows:
        return
    yield "turned one at a time, by formula (max_concurrent goes along with groups_per_batch):"
    last = ""
    for row in rows:
        key = "" if row.key == last else row.key
        last = row.key
        head = f"  {key:17}{_bare(row.before):>6} -> {_bare(row.after):<7}"
        lines = _kept(wrap(_held(row.words), COLUMNS - len(head)))
        yield head + lines[0]
        yield from (" " * len(head) + line for line in lines[1:])


def _list(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield title
        for line in lines:
            yield from _wrapped(line, 2, 4)


def _wrapped(text: str, indent: int = 0, hanging: int | None = None) -> list[str]:
    after = " " * (indent if hanging is None else hanging)
    return _kept(wrap(_held(text), COLUMNS, initial_indent=" " * indent, subsequent_indent=after))


def _held(text: str) -> str:
    """Keep a figure and what it becomes on one line."""
    return text.replace(" -> ", "\xa0->\xa0")


def _kept(lines: list[str]) -> list[str]:
    return [line.replace("\xa0", " ") for line in lines]


def _many(engines: int) -> str:
    return "1 engine" if engines == 1 else f"{engines:,} engines"
