"""Draws the study's pictures, for light and for dark pages, in the manner of docs/pictures.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from verdict import COVERED, MEASURES, Place, Row, by_lag, by_place, estimate, gap

mpl.use("Agg")
from matplotlib import pyplot as plt


@dataclass(frozen=True)
class Palette:
    """Colours of one picture; arms are told apart by colour, marker and place."""

    paper: str
    ink: str
    faint: str
    alarm: str
    arms: Mapping[str, str]


PALETTES = {
    "light": Palette(
        "#ffffff",
        "#24292f",
        "#d0d7de",
        "#cf222e",
        {
            "synchronous": "#6e7781",
            "wait": "#8250df",
            "mask": "#0969da",
            "drop": "#bc4c00",
            "train+tis": "#2da44e",
            "train+decoupled_ppo": "#116329",
            "train+reinforce": "#bf8700",
        },
    ),
    "dark": Palette(
        "#0d1117",
        "#e6edf3",
        "#30363d",
        "#ff7b72",
        {
            "synchronous": "#8b949e",
            "wait": "#bc8cff",
            "mask": "#58a6ff",
            "drop": "#f0883e",
            "train+tis": "#56d364",
            "train+decoupled_ppo": "#aff5b4",
            "train+reinforce": "#e3b341",
        },
    ),
}
MARKERS = {
    "synchronous": "x",
    "wait": "s",
    "mask": "o",
    "drop": "v",
    "train+tis": "^",
    "train+decoupled_ppo": "D",
    "train+reinforce": "P",
}
FIGURES = (("reward_per_token", "reward per sampled token"), ("reward_per_second", "reward per second"), ("p_long", "P(long) at the end"))


def draw_all(rows: list[Row], images: Path) -> list[Path]:
    """Draw every picture that the rows allow into `images`; return what was written."""
    written = []
    for name, palette in PALETTES.items():
        written.append(_arms(rows, palette, images / f"study-arms-{name}.png"))
        written.append(_coverage(rows, palette, images / f"study-coverage-{name}.png"))
        if by_lag(rows):
            written.append(_lags(rows, palette, images / f"study-lag-{name}.png"))
    return written


@contextmanager
def _figure(palette: Palette, target: Path, rows: int, columns: int, size: tuple[float, float], **more: Any) -> Iterator[Any]:
    """Yield the axes (rows, columns) of a new figure; style and write it afterwards."""
    style = {"text.color": palette.ink, "axes.labelcolor": palette.ink, "xtick.color": palette.ink, "ytick.color": palette.ink}
    with plt.rc_context({"font.size": 9, "font.family": "DejaVu Sans", **style}):
        figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", facecolor=palette.paper, squeeze=False, **more)
        yield axes
        for one in axes.flat:
            one.set_facecolor(palette.paper)
            one.grid(color=palette.faint, linewidth=0.6)
            one.set_axisbelow(True)
            for side, spine in one.spines.items():
                spine.set_visible(side in {"left", "bottom"})
                spine.set_color(palette.faint)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(7, len(labels)), frameon=False)
        figure.savefig(target, dpi=130, facecolor=palette.paper)
        plt.close(figure)


def _arms(rows: list[Row], palette: Palette, target: Path) -> Path:
    """Draw every arm over the share of slow prompts: a row of axes per figure, a column per max_staleness and learning rate."""
    places = by_place(rows)
    settings = sorted({(place.S, place.rate) for place in places})
    shares = sorted({place.share for place in places})
    with _figure(palette, target, len(FIGURES), len(settings), (10.5, 7.2), sharex=True, sharey="row") as axes:
        for column, (bound, rate) in enumerate(settings):
            axes[0, column].set_title(f"max_staleness {bound}, learning rate {rate:g}x", fontsize=9)
            axes[-1, column].set_xlabel("share of slow prompts")
            axes[-1, column].set_xticks(range(len(shares)), [f"{share:g}" for share in shares])
            for line, (key, name) in enumerate(FIGURES):
                axes[line, 0].set_ylabel(name)
                for number, arm in enumerate(palette.arms):
                    points = [
                        (place, one)
                        for place, share in enumerate(shares)
                        if (one := estimate(places.get(Place(bound, rate, share), {}).get(arm, []), key))
                    ]
                    if points:
                        _line(axes[line, column], arm, palette, points, (number - 3) * 0.06)
    return target


def _line(axes: Any, arm: str, palette: Palette, points: list[tuple[int, Any]], aside: float) -> None:
    """Draw an arm's means with their standard errors, a little aside of the others."""
    axes.errorbar(
        [place + aside for place, _ in points],
        [one.mean for _, one in points],
        [one.error for _, one in points],
        color=palette.arms[arm],
        marker=MARKERS[arm],
        markersize=5,
        linewidth=2.2 if arm == "mask" else 1.2,
        label=arm,
    )


def _coverage(rows: list[Row], palette: Palette, target: Path) -> Path:
    """Draw what mask loses against the best arm over its head coverage: of the long line, and of all fork prompts."""
    places = by_place(rows)
    with _figure(palette, target, 1, 2, (10.5, 3.8), sharey=True) as axes:
        for axis, key, name in zip(
            axes[0], ("head_coverage_long", "head_coverage_fork"), ("the long line", "all fork prompts"), strict=True
        ):
            for measure, filled in zip(MEASURES, (True, False), strict=True):
                points = [
                    (covered.mean, 100 * gap(arms, measure).relative)
                    for arms in places.values()
                    if (covered := estimate(arms["mask"], key))
                ]
                colour = palette.arms["mask"]
                face = colour if filled else "none"
                axis.scatter(*np.array(points).T, s=34, facecolors=face, edgecolors=colour, label=f"reward {MEASURES[measure]}")
            axis.axvline(COVERED, color=palette.alarm, linestyle=(0, (6, 3)), linewidth=1.4, label="alarm at 50 %")
            axis.set_xlabel(f"head coverage of {name}, arm mask")
            axis.set_xlim(-0.03, 1.03)
        axes[0, 0].set_ylabel("lost against the best arm, %")
    return target


def _lags(rows: list[Row], palette: Palette, target: Path) -> Path:
    """Draw the last versions' reward over the exact lag, one axis per learning rate; below, the smallest ESS."""
    grouped = by_lag(rows)
    rates = sorted({rate for rate, _, _ in grouped})
    lags = sorted({lag for _, _, lag in grouped})
    with _figure(palette, target, 2, len(rates), (10.5, 5.0), sharex=True, sharey="row") as axes:
        for column, rate in enumerate(rates):
            axes[0, column].set_title(f"learning rate {rate:g}x", fontsize=9)
            axes[-1, column].set_xlabel("exact lag, versions")
            axes[-1, column].set_xticks(range(len(lags)), [str(lag) for lag in lags])
            for line, (key, name) in enumerate((("final_reward", "reward at the end"), ("ess_min", "smallest ESS of a batch"))):
                axes[line, 0].set_ylabel(name)
                for number, arm in enumerate(arm for arm in palette.arms if (rate, arm, lags[0]) in grouped):
                    points = [(place, one) for place, lag in enumerate(lags) if (one := estimate(grouped.get((rate, arm, lag), []), key))]
                    _line(axes[line, column], arm, palette, points, (number - 1) * 0.08)
    return target
