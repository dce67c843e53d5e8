"""Writes the study's tables into its page, between `<!-- begin: NAME -->` and `<!-- end -->`, and draws its pictures.

python examples/study/report.py                 # from results.jsonl into docs/concepts/study.md and docs/images/
python examples/study/report.py --results FILE  # from another file; needs matplotlib, which the dev extra brings
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pictures import draw_all
from verdict import BOUNDED, MEASURES, RIVALS, SAME_LOSS, Place, Row, broken, by_lag, by_place, covered, estimate, gap, read

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results.jsonl"
PAGE, IMAGES = ROOT / "docs/concepts/study.md", ROOT / "docs/images"
ARMS = ("synchronous", *RIVALS)
COVERAGE_ARMS = ("mask", "train+decoupled_ppo")


def main() -> None:
    """Fill the page and draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--images", type=Path, default=IMAGES)
    options = parser.parse_args()
    rows = read(options.results)
    options.page.write_text(filled(options.page.read_text(), rows))
    written = draw_all(rows, options.images)
    sys.stdout.write(f"{len(rows)} rows; {options.page}, {', '.join(path.name for path in written)}\n")


def filled(page: str, rows: list[Row]) -> str:
    """Return the page with every table made anew."""

    def table(match: re.Match[str]) -> str:
        lines = TABLES[match[1]](rows)
        return "\n".join([f"<!-- begin: {match[1]} -->", *lines, "<!-- end -->"])

    return re.sub(r"<!-- begin: ([\w ]+) -->.*?<!-- end -->", table, page, flags=re.DOTALL)


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines)]


def _of_arms(key: str, form: str, *, errors: bool = True) -> Callable[[list[Row]], list[str]]:
    """Return the table of one figure: a line per place in the grid, a column per arm."""

    def table(rows: list[Row]) -> list[str]:
        lines = []
        for place, arms in by_place(rows).items():
            found = {arm: estimate(arms.get(arm, []), key) for arm in ARMS}
            best = max((one.mean for arm, one in found.items() if one and arm in RIVALS), default=None)
            cells = []
            for one in found.values():
                text = "" if one is None else format(one, form) if errors else f"{one.mean:{form}}"
                cells.append(f"**{text}**" if errors and one and one.mean == best else text)
            lines.append([*_place(place), *cells])
        return _table(["S", "rate", "slow", *ARMS], lines)

    return table


def _place(place: Place) -> list[str]:
    return [str(place.S), f"{place.rate:g}x", f"{place.share:g}"]


def _schedule(rows: list[Row]) -> list[str]:
    """Return what the arms mask, drop and train saw of the schedule."""
    lines = []
    for place, arms in by_place(rows).items():
        mask, train, drop = (arms.get(arm, []) for arm in (*COVERAGE_ARMS, "drop"))
        cells = [
            _mean(train, "long_over_share"),
            _mean(train, "over_share"),
            _mean(train, "staleness_max", "{:.1f}"),
            _mean(mask, "long_over_share"),
            _mean(mask, "head_coverage_long"),
            _mean(mask, "head_coverage_fork"),
            _mean(mask, "head_coverage"),
            _mean(mask, "masked_share"),
            _mean(mask, "ess_mean", "{:.3f}"),
            _mean(train, "ess_mean", "{:.3f}"),
            _mean(drop, "long_lost_share"),
        ]
        lines.append([*_place(place), *cells])
    header = [
        *("S", "rate", "slow", "train: long over S", "train: all over S", "train: stalest", "mask: long over S", "mask: coverage long"),
        *("mask: coverage fork", "mask: coverage all", "mask: masked", "mask: ESS", "train: ESS", "drop: long lost"),
    ]
    return _table(header, lines)


def _mean(rows: list[Row], key: str, form: str = "{:.2f}") -> str:
    one = estimate(rows, key)
    return "" if one is None else form.format(one.mean)


def _rule(rows: list[Row]) -> list[str]:
    """Return the rule's verdict, place by place."""
    places = by_place(rows)
    long, fork = covered(places), covered(places, "head_coverage_fork")
    lines = []
    for place, arms in places.items():
        gaps = [gap(arms, measure) for measure in MEASURES]
        verdict = "holds" if all(one.within for one in gaps) else "**breaks**"
        cells = [cell for one in gaps for cell in (one.best, f"{100 * one.relative:.1f} %", f"{one.errors:.1f}")]
        applies = "yes" if place in long else "fork only" if place in fork else "no"
        lines.append([*_place(place), _mean(arms["mask"], "head_coverage_long"), *cells, applies, verdict])
    measured: list[tuple[str, list[Place], dict[str, Any]]] = [
        ("By the coverage of the long line, as fixed", long, {}),
        ("By the coverage of all fork prompts", fork, {}),
        ("Afterwards: where 75 % of the long line are covered", covered(places, threshold=0.75), {}),
        ("Afterwards: among the arms that keep the bound", long, {"rivals": BOUNDED}),
        ("Afterwards: among the arms with mask's loss", long, {"rivals": SAME_LOSS}),
        ("Afterwards: with the standard error of the differences between runs of one seed", long, {"paired": True}),
    ]
    counted = [
        f"- {name}: the rule applies at {len(where)} places and is broken at {len(broken(places, where, **more))}."
        for name, where, more in measured
    ]
    measures = [cell for name in MEASURES.values() for cell in (f"best {name}", "lost", "in SE")]
    return [*_table(["S", "rate", "slow", "coverage long", *measures, "applies", "rule"], lines), "", *counted]


def _arms(rows: list[Row]) -> list[str]:
    """Return at how many places each arm is within one standard error of the best: where the rule applies, and everywhere."""
    places = by_place(rows)
    loosest = max(place.S for place in places)
    lines = []
    for arm in RIVALS:
        cells = []
        for where in (covered(places), list(places)):
            near = [[gap(places[place], measure, arm=arm).within for measure in MEASURES] for place in where]
            cells += [f"{sum(flags[number] for flags in near)} of {len(near)}" for number in range(len(MEASURES))]
            cells.append(f"{sum(all(flags) for flags in near)} of {len(near)}")
        stalest = [estimate(arms[arm], "staleness_max") for place, arms in places.items() if loosest == place.S]
        lines.append([arm, *cells, f"{max(one.mean for one in stalest if one):.0f}"])
    names = [*MEASURES.values(), "both"]
    header = ["arm", *(f"covered: {name}" for name in names), *(f"everywhere: {name}" for name in names), f"stalest token, S = {loosest}"]
    return _table(header, lines)


def _collapse(rows: list[Row]) -> list[str]:
    """Return the collapse study: reward at the end and the smallest ESS by learning rate, loss and exact lag."""
    grouped = by_lag(rows)
    lags = sorted({lag for _, _, lag in grouped})
    lines = []
    for rate, arm in sorted({(rate, arm) for rate, arm, _ in grouped}):
        ends = [estimate(grouped.get((rate, arm, lag), []), "final_reward") for lag in lags]
        cells = ["" if one is None else format(one, ".3f") for one in ends]
        lines.append([f"{rate:g}x", arm, *cells, *(_mean(grouped.get((rate, arm, lag), []), "ess_min") for lag in lags)])
    return _table(["rate", "loss", *(f"lag {lag}" for lag in lags), *(f"ESS, lag {lag}" for lag in lags)], lines)


TABLES: dict[str, Callable[[list[Row]], list[str]]] = {
    "per token": _of_arms("reward_per_token", ".4f"),
    "per second": _of_arms("reward_per_second", ".1f"),
    "at the end": _of_arms("final_reward", ".3f"),
    "p long": _of_arms("p_long", ".2f", errors=False),
    "schedule": _schedule,
    "rule": _rule,
    "arms": _arms,
    "collapse": _collapse,
}


if __name__ == "__main__":
    main()
