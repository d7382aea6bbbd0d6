"""Did the gate see what came of the jobs? Validation loss there against the best one that each job reached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from alto_core import wording
from alto_core.report.svg import Canvas, Scale
from alto_core.report.values import JobRow
from alto_core.result import GateRecord

MIN_POINTS = 3
"""Below this neither a picture nor a correlation says anything."""


@dataclass(frozen=True, kw_only=True)
class GatePoint:
    """One job that the gate ranked."""

    row: JobRow
    at_gate: float
    final: float | None
    """Best validation loss; None for a job that the gate ended for good."""


def gate_points(gate: GateRecord, jobs: Sequence[JobRow]) -> tuple[GatePoint, ...]:
    """The ranked jobs, those with a loss that is no number left out."""
    rows = {row.job_id: row for row in jobs}
    points = []
    for entry in gate.entries:
        row = rows.get(entry.job_id)
        if row is None or entry.gate_rank is None or entry.val_loss is None or not math.isfinite(entry.val_loss):
            continue
        final = row.best_val_loss if entry.kept or row.was_revived_after(entry) else None
        if final is None or math.isfinite(final):
            points.append(GatePoint(row=row, at_gate=entry.val_loss, final=final))
    return tuple(points)


def rank_correlation(points: Sequence[GatePoint]) -> float | None:
    """Spearman's correlation of loss at the gate and final loss, over the jobs that went on; None for fewer than 3."""
    pairs = [(p.at_gate, p.final) for p in points if p.final is not None]
    if len(pairs) < MIN_POINTS:
        return None
    first, second = (_ranks([pair[i] for pair in pairs]) for i in (0, 1))
    mean = (len(pairs) - 1) / 2
    covariance = sum((a - mean) * (b - mean) for a, b in zip(first, second, strict=True))
    spread = math.sqrt(sum((a - mean) ** 2 for a in first) * sum((b - mean) ** 2 for b in second))
    return covariance / spread if spread else None


def gate_scatter(points: Sequence[GatePoint], *, winner: str | None, width: float) -> str | None:
    """Jobs that went on as dots, the ones that ended at the gate as strokes on the axis, where their loss stood.

    Returns:
        SVG text; None with fewer than three jobs that went on.
    """
    went_on = [p for p in points if p.final is not None]
    if len(went_on) < MIN_POINTS:
        return None
    narrow = width < 560
    canvas = Canvas(width, 250 if narrow else 300, "Validation loss at the gate against the best one reached")
    bottom, top = canvas.height - 44, 30.0
    x = _scale([p.at_gate for p in points], 52, width - 16)
    y = _scale([p.final for p in went_on if p.final is not None], bottom, top)
    for tick in y.ticks(5):
        canvas.line(x.start, y(tick), x.end, y(tick), "grid")
        canvas.text(x.start - 6, y(tick) + 4, f"{tick:g}", "tick", "end")
    for tick in x.ticks(4 if narrow else 8):
        canvas.text(x(tick), bottom + 22, f"{tick:g}", "tick", "middle")
    canvas.text(8, 14, "best validation loss", "axis")
    canvas.text((x.start + x.end) / 2, canvas.height - 4, "validation loss at the gate", "axis", "middle")
    for point in sorted(points, key=lambda p: p.row.job_id == winner):
        _draw(canvas, point, x, y, bottom, is_winner=point.row.job_id == winner)
    return canvas.render()


def _draw(canvas: Canvas, point: GatePoint, x: Scale, y: Scale, bottom: float, *, is_winner: bool) -> None:
    row, at = point.row, x(point.at_gate)
    fate = "winner" if is_winner else str(row.state)
    told = (
        f"{row.job_id}\n{row.label}\nat the gate {wording.loss(point.at_gate)}, best {wording.loss(row.best_val_loss)}"
    )
    group = canvas.group(f"fate-{fate}", told)
    if point.final is None:
        group.line(at, bottom - 2, at, bottom + 8, "mark-line")
        return
    group.circle(at, y(point.final), 7 if is_winner else 5, "mark")
    if is_winner:
        is_right = at > (x.start + x.end) / 2
        group.text(
            at + (-11 if is_right else 11), y(point.final) + 4, "winner", "label halo", "end" if is_right else "start"
        )


def _scale(values: Sequence[float], start: float, end: float) -> Scale:
    """A lone high loss would press all others into one corner; it is drawn at the edge instead."""
    ordered = sorted(values)
    low, high = ordered[0], min(ordered[-1], 3 * ordered[len(ordered) // 2])
    margin = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    return Scale(low=low - margin, high=high + margin, start=start, end=end)


def _ranks(values: Sequence[float]) -> list[float]:
    """From 0; equal values share the mean of their places."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]
