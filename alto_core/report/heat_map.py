"""What learning rate and rank do: the best validation loss of each combination, darker where it is lower."""

from __future__ import annotations

import math
from collections.abc import Sequence

from alto_core import wording
from alto_core.report.svg import Canvas
from alto_core.report.values import JobRow

MAX_COLUMNS = 8
CELL_HEIGHT = 34.0
LIGHTEST, DARKEST = 0.08, 0.6
"""Opacity of the worst and of the best cell; text stays readable on both."""


def heat_map(jobs: Sequence[JobRow], *, winner: str | None, width: float) -> str | None:
    """One cell per learning rate and rank. Jobs that differ otherwise share a cell, which shows the best of them.

    Returns:
        SVG text; None where neither learning rate nor rank was varied.
    """
    columns = _columns(jobs)
    rows = sorted({row.job.lora_rank for row in jobs}, reverse=True)
    if len(columns) < 2 and len(rows) < 2:
        return None
    cells: dict[tuple[float, int], list[JobRow]] = {}
    for job in jobs:
        cells.setdefault((_nearest(job.job.learning_rate, columns), job.job.lora_rank), []).append(job)
    losses = sorted({loss for members in cells.values() if (loss := _best(members)) is not None})
    left, top = 46.0, 24.0
    cell_width = (width - left) / len(columns)
    canvas = Canvas(width, top + CELL_HEIGHT * len(rows) + 40, "Best validation loss by learning rate and rank")
    canvas.text(0, 14, "rank", "axis")
    for j, lora_rank in enumerate(rows):
        y = top + CELL_HEIGHT * j
        canvas.text(left - 10, y + CELL_HEIGHT / 2 + 4, str(lora_rank), "tick", "end")
        for i, rate in enumerate(columns):
            members = cells.get((rate, lora_rank), [])
            if members:
                _draw_cell(canvas, members, losses, left + cell_width * i, y, cell_width, winner)
    bottom = top + CELL_HEIGHT * len(rows)
    for i, rate in enumerate(columns):
        canvas.text(left + cell_width * (i + 0.5), bottom + 16, wording.rate(rate), "tick", "middle")
    canvas.text((left + width) / 2, bottom + 34, "learning rate", "axis", "middle")
    return canvas.render()


def _draw_cell(
    canvas: Canvas,
    members: Sequence[JobRow],
    losses: Sequence[float],
    x: float,
    y: float,
    width: float,
    winner: str | None,
) -> None:
    best = _best(members)
    holds_winner = any(row.job_id == winner for row in members)
    told = "\n".join(f"{row.job_id}: {row.state}, best {wording.loss(row.best_val_loss)}" for row in members)
    group = canvas.group("fate-winner" if holds_winner else "fate-racing", told)
    if best is None:
        group.text(x + width / 2, y + CELL_HEIGHT / 2 + 4, "no loss" if width > 50 else "-", "tick", "middle")
        return
    # by place, not by value: one bad corner would make all the others look alike
    share = 1.0 if len(losses) < 2 else 1 - losses.index(best) / (len(losses) - 1)
    opacity = LIGHTEST + share * (DARKEST - LIGHTEST)
    group.rect(x + 1, y + 1, width - 2, CELL_HEIGHT - 2, "heat", radius=3, opacity=opacity)
    text = f"{best:.3f}" if width > 40 else f"{best:.2g}"
    css = "label on-heat strong" if holds_winner else "label"
    group.text(x + width / 2, y + CELL_HEIGHT / 2 + 4, text, css, "middle")


def _columns(jobs: Sequence[JobRow]) -> list[float]:
    """The learning rates; of many, as in a random search, round ones that stand for their neighbourhood."""
    rates = sorted({row.job.learning_rate for row in jobs})
    if len(rates) <= MAX_COLUMNS:
        return rates
    for per_decade in (3, 2, 1):
        rounded = sorted({10 ** (round(math.log10(rate) * per_decade) / per_decade) for rate in rates})
        if len(rounded) <= MAX_COLUMNS:
            break
    return rounded


def _nearest(rate: float, columns: Sequence[float]) -> float:
    return min(columns, key=lambda column: abs(math.log(column / rate)))


def _best(members: Sequence[JobRow]) -> float | None:
    losses = [row.best_val_loss for row in members if row.best_val_loss is not None]
    return min((loss for loss in losses if math.isfinite(loss)), default=None)
