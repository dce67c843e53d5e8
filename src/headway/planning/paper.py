"""What pictures are drawn on: colours for light and for dark pages, axes without more frame than needed, a figure as the bytes of a PNG.

The only module that touches matplotlib (the extra `pictures`), and only when it is called. Colours are those of Okabe and Ito, which people
who see fewer colours tell apart; and nothing is told by colour alone: bars are hatched, lines have marks.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from headway.config.toml import toml_value

Figure: TypeAlias = Any  # of matplotlib, which may not be there
Axes: TypeAlias = Any
DOTS_PER_INCH = 130
_MOST_LETTERS = 20  # of a value
MARKS = "os^Dvph<"


@dataclass(frozen=True)
class Palette:
    """Colours of one picture. `causes`: why somebody waits; `series`: lines of a picture that has several."""

    paper: str
    ink: str
    faint: str
    work: str
    masked: str
    fault: str
    other: str
    causes: tuple[str, ...]
    series: tuple[str, ...]


PALETTES = {
    "light": Palette(
        paper="#ffffff",
        ink="#24292f",
        faint="#d0d7de",
        work="#0072b2",
        masked="#e69f00",
        fault="#d55e00",
        other="#c9d1d9",
        causes=("#e69f00", "#cc79a7", "#009e73", "#f0e442"),
        series=("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#5b3a8e", "#6e7781"),
    ),
    "dark": Palette(
        paper="#0d1117",
        ink="#e6edf3",
        faint="#30363d",
        work="#56b4e9",
        masked="#e69f00",
        fault="#ff7b3d",
        other="#484f58",
        causes=("#e69f00", "#e79bc4", "#2bc79a", "#f0e442"),
        series=("#56b4e9", "#e69f00", "#2bc79a", "#e79bc4", "#a5b4ff", "#ff7b3d", "#f0e442", "#9ea7b3"),
    ),
}

Draw: TypeAlias = Callable[[Palette], Figure]


def figure_of(palette: Palette, width: float, height: float) -> Figure:
    """Return an empty figure of so many inches."""
    from matplotlib.figure import Figure as Canvas

    return Canvas(figsize=(width, height), layout="constrained", facecolor=palette.paper)


def png(draw: Draw, palette: Palette) -> bytes:
    """Return a picture as PNG: the same bytes every time. Raises ImportError where matplotlib is not installed."""
    import matplotlib as mpl

    ink = dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), palette.ink)
    data = io.BytesIO()
    with mpl.rc_context():
        mpl.rcdefaults()  # whatever the reader's matplotlibrc says
        mpl.rcParams.update({"font.size": 10, "font.family": "DejaVu Sans", "text.parse_math": False, "hatch.linewidth": 0.6, **ink})
        draw(palette).savefig(data, format="png", dpi=DOTS_PER_INCH, facecolor=palette.paper, metadata={"Software": None})
    return data.getvalue()


def style(axes: Axes, palette: Palette, *, grid: str = "both") -> None:
    """Give axes the page's colours; `grid`: "x", "y" or "both"."""
    axes.set_facecolor(palette.paper)
    axes.grid(visible=False)
    axes.grid(color=palette.faint, linewidth=0.6, axis=grid)
    axes.set_axisbelow(True)
    axes.tick_params(length=0 if grid == "both" else 2)
    for side, spine in axes.spines.items():
        spine.set_visible(side in {"left", "bottom"})
        spine.set_color(palette.faint)


def brief(value: Any) -> str:
    """Return a value that a picture has little room for: of a distribution what is in it, of a long text its beginning."""
    if isinstance(value, dict):
        return brief(" ".join(brief(inner) for inner in value.values() if not isinstance(inner, (dict, list))))
    text = value if isinstance(value, str) else toml_value(value)
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."


def whole_numbers(axis: Any) -> None:
    """Let an axis have ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", integer=True))
