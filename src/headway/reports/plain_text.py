"""What reports on a terminal have in common: ASCII, 80 columns, so that any terminal and any log can show them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

BAR = 44
MOST_ROWS = 20  # of a histogram; what is staler shares the last one


def percent(share: float | None) -> str:
    """Return a share as it is shown: what is not 0 is never shown as 0."""
    if share is None:
        return "-"
    return f"{share:.1%}" if share == 0 or share >= 0.001 else "<0.1%"


def length_of(count: int, most: int, columns: int) -> int:
    """Return the length of a bar, at least one column for what is not nothing; `most` fills `columns`."""
    return max(1, round(columns * count / most)) if count else 0


def staleness_histogram(trained: Sequence[int], masked: Mapping[int, int], bound: int, *, masks: bool) -> Iterator[str]:
    """Yield the lines of a histogram of tokens by staleness, max_staleness (`bound`) drawn in it; `masks`: it is one of two kinds."""
    total = sum(trained) + sum(masked.values())
    stalest = max([len(trained) - 1, *masked], default=0)
    rows = max(min(stalest + 1, MOST_ROWS), bound + 2 if stalest > bound else 0)
    solid, pale = [0] * rows, [0] * rows
    for staleness, count in enumerate(trained):
        solid[min(staleness, rows - 1)] += count
    for staleness, count in masked.items():
        pale[min(staleness, rows - 1)] += count
    most = max(max(map(sum, zip(solid, pale, strict=True)), default=1), 1)
    yield "staleness   share of tokens: # trained" + (", . masked" if masks else "")
    for staleness in range(rows):
        here = solid[staleness] + pale[staleness]
        label = f"{staleness}" + ("+" if staleness == rows - 1 < stalest else "")
        inner, whole = (length_of(count, most, BAR) for count in (solid[staleness], here))
        yield f"{label:>9}   {percent(here / max(1, total)):>7}  {'#' * inner}{'.' * (whole - inner)}".rstrip()
        if staleness == bound:
            yield f"{'-' * 20}  max_staleness = {bound}  {'-' * 20}"
