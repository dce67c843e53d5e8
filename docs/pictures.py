"""Draws the README's picture from a run directory: reward above, staleness and its bound below, for light and for dark pages.

    python docs/pictures.py runs/guess            # writes docs/images/run-light.png and docs/images/run-dark.png

Reads what every run leaves behind (metrics.jsonl, eval.jsonl, config.toml) and needs matplotlib, which the dev extra brings.
"""

# ruff: noqa: INP001  a script, not a package

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt

SMOOTHED_BATCHES = 10
IMAGES = Path(__file__).parent / "images"


@dataclass(frozen=True)
class Palette:
    """Colours of one picture; both sets keep a contrast of 4.5 or more between text and paper."""

    paper: str
    ink: str
    faint: str
    reward: str
    evaluation: str
    staleness: str
    bound: str


PALETTES = {
    "light": Palette("#ffffff", "#24292f", "#d0d7de", "#0969da", "#bc4c00", "#2da44e", "#cf222e"),
    "dark": Palette("#0d1117", "#e6edf3", "#30363d", "#58a6ff", "#f0883e", "#3fb950", "#ff7b72"),
}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Return the mean of each value and the `width` - 1 before it, or of as many as there are."""
    total = np.cumsum(np.insert(values, 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - width)
    return (total[ends] - total[starts]) / (ends - starts)


def draw(run: Path, palette: Palette, target: Path) -> None:
    """Draw the run into `target`."""
    rows, evals = read_rows(run / "metrics.jsonl"), read_rows(run / "eval.jsonl")
    if not rows:
        raise SystemExit(f"{run}: has no metrics.jsonl with a row in it: name the directory of a run that has trained")
    bound = tomllib.loads((run / "config.toml").read_text())["rollout"]["max_staleness"]
    column = {key: np.array([row[key] for row in rows], float) for key in rows[0] if key.startswith(("batch", "reward_mean", "token_stal"))}
    batch = column["batch"]
    style = {"text.color": palette.ink, "axes.labelcolor": palette.ink, "xtick.color": palette.ink, "ytick.color": palette.ink}
    with plt.rc_context({"font.size": 10, "font.family": "DejaVu Sans", **style}):
        figure, (above, below) = plt.subplots(
            2, 1, sharex=True, figsize=(8.4, 4.8), height_ratios=(3, 2), layout="constrained", facecolor=palette.paper
        )
        above.plot(batch, column["reward_mean"], color=palette.reward, alpha=0.5, linewidth=1, label="a batch")
        above.plot(
            batch,
            running_mean(column["reward_mean"], SMOOTHED_BATCHES),
            color=palette.reward,
            linewidth=2,
            label=f"mean of the last {SMOOTHED_BATCHES}",
        )
        if evals:
            versions, rewards = zip(*((row["version"], row["reward_mean"]) for row in evals if row["reward_mean"] is not None), strict=True)
            above.plot(versions, rewards, "o", color=palette.evaluation, markersize=7, label="evaluation")
        above.set_ylabel("mean reward")
        above.set_ylim(0, 1.05)
        below.fill_between(batch, column["token_staleness_max"], step="mid", color=palette.staleness, alpha=0.18, linewidth=0)
        below.step(batch, column["token_staleness_max"], where="mid", color=palette.staleness, linewidth=1, label="max (tokens and heads)")
        below.step(batch, column["token_staleness_p99"], where="mid", color=palette.staleness, linewidth=2.2, label="p99 of tokens")
        below.plot(batch, column["token_staleness_mean"], color=palette.ink, linewidth=1.2, label="mean of tokens")
        below.axhline(bound, color=palette.bound, linestyle=(0, (6, 3)), linewidth=1.6, label=f"max_staleness = {bound}")
        below.set_ylabel("staleness, versions")
        below.set_yticks(range(bound + 2))
        below.set_ylim(0, bound + 0.9)
        below.set_xlabel("batch")
        for axes, columns in ((above, 1), (below, 4)):
            axes.set_facecolor(palette.paper)
            axes.grid(color=palette.faint, linewidth=0.6)
            axes.set_axisbelow(True)
            axes.margins(x=0.01)
            for side, spine in axes.spines.items():
                spine.set_visible(side in {"left", "bottom"})
                spine.set_color(palette.faint)
            axes.legend(loc="upper left", frameon=False, fontsize=9, ncols=columns, columnspacing=1.4, handlelength=2.6)
        figure.savefig(target, dpi=150, facecolor=palette.paper)
        plt.close(figure)


def main() -> None:
    """Draw both pictures of the run named on the command line."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python docs/pictures.py RUN_DIRECTORY")
    IMAGES.mkdir(exist_ok=True)
    for name, palette in PALETTES.items():
        draw(Path(sys.argv[1]), palette, IMAGES / f"run-{name}.png")


if __name__ == "__main__":
    main()
