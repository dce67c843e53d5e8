"""The histogram of staleness as a picture, max_staleness drawn in it. Needs matplotlib, which headway itself does not."""

from __future__ import annotations

from pathlib import Path

from headway.errors import ConfigError, HeadwayError
from headway.reports.staleness import StalenessReport

TRAINED, MASKED, BOUND = "#2da44e", "#afb8c1", "#cf222e"


def draw(report: StalenessReport, path: Path) -> None:
    """Write the picture, in the format that the name's ending asks for; raises ConfigError, and HeadwayError when it cannot be written."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError("--picture needs matplotlib, which is not installed: pip install matplotlib") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figures = report.staleness
    total = max(1, figures.contributing_tokens + figures.masked_tokens)
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    trained = [100 * count / total for count in figures.histogram]
    axes.bar(range(len(trained)), trained, color=TRAINED, label="trained on")
    if figures.masked_histogram:
        below = [trained[staleness] if staleness < len(trained) else 0.0 for staleness in figures.masked_histogram]
        masked = [100 * count / total for count in figures.masked_histogram.values()]
        axes.bar(list(figures.masked_histogram), masked, bottom=below, color=MASKED, label="masked")
    axes.axvline(report.max_staleness + 0.5, color=BOUND, linestyle="--", label=f"max_staleness = {report.max_staleness}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("staleness (versions)")
    axes.set_ylabel("share of tokens (%)")
    axes.set_title(f"{report.run}: {report.batches} batches, on_stale = {report.on_stale}")
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    except OSError as error:
        raise HeadwayError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        plt.close(figure)
