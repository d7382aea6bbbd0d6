"""Curves as lines of text, for terminals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from alto_core import wording


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points to draw with one sign. A later series hides an earlier one."""

    sign: str
    points: Sequence[tuple[float, float]]
    """x in [0, 1], y any; points that are not finite are left out."""


def plot(series: Sequence[Series], *, width: int, height: int, marks: Sequence[float] = ()) -> list[str]:
    """Draw curves over the share of the budget.

    Args:
        series: what to draw.
        width: columns of the drawing, its labels included.
        height: lines of the drawing, the axis not included.
        marks: x of vertical lines.

    Returns:
        Lines of text; none when no point is finite.
    """
    finite = [[(x, y) for x, y in one.points if math.isfinite(y)] for one in series]
    values = [y for points in finite for _, y in points]
    if not values:
        return []
    low, high = _range(values)
    labels = [wording.loss(high - (high - low) * line / (height - 1)) for line in range(height)]
    margin = max(map(len, labels)) + 1
    columns = max(10, width - margin - 1)
    grid = [[" "] * columns for _ in range(height)]
    for x in marks:
        for row in grid:
            row[_column(x, columns)] = "┆"
    for one, points in zip(series, finite, strict=True):
        for x, y in points:
            from_the_top = round((high - min(max(y, low), high)) / (high - low) * (height - 1))
            grid[from_the_top][_column(x, columns)] = one.sign
    shown = {0, height // 2, height - 1}
    lines = [f"{labels[i] if i in shown else '':>{margin}}│{''.join(line)}".rstrip() for i, line in enumerate(grid)]
    left, middle, right = "0 %", "50 %", "100 % of the budget"
    axis = f"{left}{middle:>{columns // 2 - len(left) + 2}}{right:>{max(len(right) + 1, columns - columns // 2 - 2)}}"
    return [*lines, f"{'':>{margin}}└{'─' * columns}", f"{'':>{margin}} {axis}"]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Of the y axis: a few values far above the rest are cut, or nothing else could be told apart."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    usual = ordered[int(0.9 * (len(ordered) - 1))]
    if high - low > 4 * (usual - low) > 0:
        high = low + 2 * (usual - low)
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def _column(x: float, columns: int) -> int:
    return min(columns - 1, max(0, round(x * (columns - 1))))
