"""The reports of `headway inspect` as plain text for a terminal of 80 columns: ASCII, so that any terminal and any log can show them."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from headway.reports.bias import Audit, BiasReport
from headway.reports.plain_text import MOST_ROWS, percent, staleness_histogram
from headway.reports.quarantine import QuarantineReport
from headway.reports.staleness import Distribution, Staleness, StalenessReport
from headway.reports.waste import WasteReport

SHORT_BAR = 20
_UNITS = {"length": "length in sampled tokens", "turns": "turns", "seconds": "duration in seconds", "reward": "reward"}


def staleness_text(report: StalenessReport) -> str:
    """Return the report with a histogram of staleness, max_staleness drawn in it."""
    figures = report.staleness
    batches = _many(report.batches, "batch", "batches")
    lines = [
        f"{_head(report.run, report.ended)}: {batches} trained, max_staleness {report.max_staleness}, on_stale {report.on_stale}",
        "",
        *staleness_histogram(figures.histogram, figures.masked_histogram, report.max_staleness, masks=report.on_stale == "mask"),
        "",
        f"{'staleness in versions':28}{'mean':>8}{'p50':>8}{'p95':>8}{'p99':>8}{'max':>8}",
        _row("trained tokens", figures.tokens),
        _row("heads of trained rollouts", figures.heads),
        "",
        *_shares(report),
        "",
        *_coverage(figures),
        "",
        *_batches(report),
    ]
    return "\n".join(lines).rstrip()


def _head(run: str, ended: bool) -> str:
    return f"run {run}, {'ended' if ended else 'not ended'}"


def _many(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


def _row(name: str, figures: Distribution) -> str:
    mean = "-" if figures.mean is None else f"{figures.mean:.2f}"
    whole = ["-" if value is None else str(value) for value in (figures.p50, figures.p95, figures.p99, figures.max)]
    return f"{name:28}{mean:>8}" + "".join(f"{value:>8}" for value in whole)


def _shares(report: StalenessReport) -> Iterator[str]:
    figures = report.staleness
    if figures.in_flight_share is not None and figures.in_flight_mean is not None and figures.queued_mean is not None:
        yield f"grown in flight: {percent(figures.in_flight_share)} ({figures.in_flight_mean:.2f} versions)"
        yield f"grown while the ready group waited: {percent(figures.queued_share)} ({figures.queued_mean:.2f} versions)"
    masked = f"{figures.masked_tokens:,} ({percent(figures.masked_share)})"
    yield f"tokens trained on: {figures.contributing_tokens:,}; masked as too old: {masked}"
    if report.on_stale == "train":
        yield f"trained on over max_staleness: {percent(figures.share_over_bound)}"
    if figures.replayed_tokens:
        yield f"replayed and external tokens, in none of these figures: {figures.replayed_tokens:,}"


def _coverage(figures: Staleness) -> Iterator[str]:
    yield f"head coverage (rollouts whose first token trains): {percent(figures.head_coverage)}"
    yield f"{'in percent':16}{'rollouts':>9}  all   by length, a tenth each, shortest first"
    for environment in figures.environments:
        name = environment.environment[:70]
        if len(name) > 15:
            yield name
            name = ""
        tenths = "".join("   -" if share is None else f"{100 * share:4.0f}" for share in environment.by_length)
        yield f"{name:16}{environment.rollouts:>9,}{100 * environment.head_coverage:5.0f}  {tenths}"


def _batches(report: StalenessReport) -> Iterator[str]:
    yield f"{'last batches':>12}{'mean':>8}{'p50':>6}{'p95':>6}{'p99':>6}{'max':>6}{'heads':>8}{'masked':>9}{'coverage':>10}"
    for batch in report.last_batches:
        figures, tokens = batch.staleness, batch.staleness.tokens
        mean, heads = ("-" if value is None else f"{value:.2f}" for value in (tokens.mean, figures.heads.mean))
        whole = "".join("     -" if value is None else f"{value:6}" for value in (tokens.p50, tokens.p95, tokens.p99, tokens.max))
        yield f"{batch.batch:>12}{mean:>8}{whole}{heads:>8}{percent(figures.masked_share):>9}{percent(figures.head_coverage):>10}"


def waste_text(report: WasteReport) -> str:
    """Return the table of where sampled tokens went, and what it adds up to."""
    lines = [f"{_head(report.run, report.ended)}: where every sampled token went", "", f"{'tokens':>14}{'share':>9}"]
    for row in report.rows:
        if row.tokens or row.row in {"trained", "masked", "stale", "undelivered"}:
            lines.append(f"{row.tokens:>14,}{percent(row.share):>9}  {row.row.replace('_', ' ')}: {row.meaning}")
        if row.row == "failed":
            lines += [f"{'':25}    {count:,} {cause}" for cause, count in report.failed_by_cause.items()]
    lines += [f"{'-' * 14}", f"{report.sampled_tokens:>14,}{'':9}  in all"]
    if report.engine_sampled_tokens is None:
        lines.append("\nThe engines do not say what they have sampled: what they wrote and nobody received is missing.")
    else:
        lines.append(f"{report.engine_sampled_tokens:>14,}{'':9}  by the engines' own count")
        if report.delivered_since:
            lines.append(f"{report.delivered_since:>14,}{'':9}  delivered after that count")
    lines += ["", f"weight syncs took {report.sync_engine_seconds:,.1f} engine-seconds"]
    lines += [f"THE BOOKS DO NOT CLOSE: {problem}" for problem in report.problems]
    return "\n".join(lines)


def bias_text(report: BiasReport) -> str:
    """Return the histograms of generated and trained rollouts side by side, and the prompts that were put back most."""
    lines = [f"{_head(report.run, report.ended)}: trained rollouts beside all that were generated", ""]
    for environment in report.environments:
        lines += [f"environment {environment.environment}: {environment.generated:,} generated, {environment.trained:,} trained", ""]
        for audit in environment.audits:
            lines += [*_audit(audit), ""]
    if report.lost:
        causes = ", ".join(f"{cause} {count:,}" for cause, count in report.lost.items())
        lines += [f"lost before they had a length: {causes}", ""]
    lines.append(f"{_many(report.prompts, 'prompt', 'prompts')}, {report.prompts_never_trained:,} of them ended and never trained")
    if report.starved:
        lines.append(f"{'put back':>10}{'given up':>10}{'admitted':>10}{'trained':>10}  prompt")
        for prompt in report.starved:
            lines.append(f"{prompt.requeued:>10}{prompt.given_up:>10}{prompt.admitted:>10}{prompt.trained:>10}  {prompt.prompt_id[:36]}")
    return "\n".join(lines)


def quarantine_text(report: QuarantineReport) -> str:
    """Return the prompts that are never tried again, with their reasons, and those that fail at present."""
    given_up = len(report.quarantined)
    lines = [f"{_head(report.run, report.ended)}: {_many(given_up, 'prompt', 'prompts')} in quarantine"]
    for prompt in report.quarantined:
        lost = ", ".join(f"{cause} {count}" for cause, count in prompt.lost_to.items())
        lines += [
            "",
            *_wrapped(f"{prompt.prompt_id} (epoch {prompt.epoch}): {prompt.detail}"),
            *_wrapped(f"members lost: {lost or 'none'}", 4),
        ]
        lines += _wrapped(f"the last: {prompt.last_loss}", 4) if prompt.last_loss else []
    if report.failing:
        lines += ["", "failed groups in a row, of prompts that are tried again:"]
        lines += [f"{count:>6}  {_ascii(prompt)[:70]}" for prompt, count in list(report.failing.items())[:MOST_ROWS]]
    if report.missing:
        lines += ["", "were to be tried again, and the prompt source no longer has them:"]
        lines += [f"        {_ascii(prompt.prompt_id)[:50]} (epoch {prompt.epoch})" for prompt in report.missing[:MOST_ROWS]]
        if len(report.missing) > MOST_ROWS:
            lines.append(f"        and {len(report.missing) - MOST_ROWS:,} more")
    return "\n".join(lines)


def _wrapped(text: str, indent: int = 0) -> list[str]:
    """Return the text in lines of 80 columns: environments say what they like."""
    return wrap(_ascii(text), 80, initial_indent=" " * indent, subsequent_indent=" " * (indent + 4), max_lines=4)


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()


def _audit(audit: Audit) -> Iterator[str]:
    generated = sum(each.generated for each in audit.ranges)
    trained = sum(each.trained for each in audit.ranges)
    yield f"{_UNITS[audit.quantity]}: mean {_number(audit.generated_mean)} generated, {_number(audit.trained_mean)} trained"
    shares = [(each.generated / max(1, generated), each.trained / max(1, trained)) for each in audit.ranges]
    most = max((max(pair) for pair in shares), default=1.0)
    for each, pair in zip(audit.ranges, shares, strict=True):
        label = _number(each.low) if each.low == each.high else f"{_number(each.low)} - {_number(each.high)}"
        columns = [f"{percent(share):>7} {'#' * round(SHORT_BAR * share / most):{SHORT_BAR}}" for share in pair]
        yield f"{label:>20}  {columns[0]} {columns[1]}".rstrip()


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
