"""Loss curves of all jobs in one picture, coloured by how each job ended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from alto_core import wording
from alto_core.domain import JobState
from alto_core.early_exit.curves import Curve
from alto_core.report.svg import Canvas, Scale, spread
from alto_core.report.values import JobRow

EMA_ALPHA = 0.1
"""Smoothing of the faint train curves, as in the paper's detectors."""
MAX_LABELS = 10
MAX_POINTS = 240
"""Points of one drawn line; more than pixels can show only make the page heavy."""
LABEL_GAP = 14.0
GATE_LABEL_WIDTH = 34.0

DRAW_ORDER = (
    JobState.UNDERPERFORMING,
    JobState.CANCELLED,
    JobState.FAILED,
    JobState.DIVERGING,
    JobState.OVERFITTING,
    JobState.WAITING,
    JobState.RUNNING,
    JobState.FINISHED,
)
"""What a reader looks for is drawn last, on top."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class _Frame:
    canvas: Canvas
    x: Scale
    y: Scale
    top: float
    bottom: float


def curve_chart(
    jobs: Sequence[JobRow], curves: Mapping[str, Curve], *, winner: str | None, gates: Sequence[float], width: float
) -> str | None:
    """Draw validation loss (strong) and smoothed train loss (faint) over the share of each job's own budget.

    Losses above the frame, and those that are no numbers, are shown at its upper edge.

    Returns:
        SVG text; None when nothing finite was measured.
    """
    drawn = [row for row in jobs if row.job_id in curves]
    drawn.sort(key=lambda row: (row.job_id == winner, DRAW_ORDER.index(row.state)))
    scale = _loss_scale([curves[row.job_id] for row in drawn], start=0, end=1)
    if scale is None:
        return None
    narrow = width < 560
    frame = _frame(width, 314 if narrow else 434, scale, right=78 if narrow else 118)
    _draw_axes(frame, gates, narrow)
    ends: list[tuple[JobRow, float, float]] = []
    for row in drawn:
        end = _draw_job(frame, row, curves[row.job_id], is_winner=row.job_id == winner)
        if end is not None:
            ends.append((row, *end))
    _draw_labels(frame, ends, winner, narrow)
    return frame.canvas.render()


def _loss_scale(curves: Sequence[Curve], *, start: float, end: float) -> Scale | None:
    """From the lowest loss to a little above where jobs began; what diverges beyond that leaves the frame."""
    finite = [[v for v in c.val_losses if math.isfinite(v)] for c in curves]
    finite = [values for values in finite if values]
    if not finite:
        return None
    low = min(min(values) for values in finite)
    firsts = sorted(values[0] for values in finite)
    lasts = sorted(values[-1] for values in finite)
    high = max(firsts[len(firsts) // 2] * 1.25, lasts[len(lasts) // 2] * 1.6, low * 1.1)
    high = min(high, max(max(values) for values in finite) * 1.02)
    if low <= 0:
        return Scale(low=low, high=max(high, low + 1e-6), start=start, end=end)
    high = max(high, low * 1.02)
    if high / low > 4:
        return Scale(low=low / 1.12, high=high * 1.12, start=start, end=end, log=True)
    margin = 0.06 * (high - low)
    return Scale(low=low - margin, high=high + margin, start=start, end=end)


def _frame(width: float, height: float, scale: Scale, *, right: float) -> _Frame:
    left, top, bottom = 44.0, 40.0, height - 40
    canvas = Canvas(width, height, "Loss of every job over its own budget")
    y = Scale(low=scale.low, high=scale.high, start=bottom, end=top, log=scale.log)
    return _Frame(canvas=canvas, x=Scale(low=0, high=1, start=left, end=width - right), y=y, top=top, bottom=bottom)


def _draw_axes(frame: _Frame, gates: Sequence[float], narrow: bool) -> None:
    canvas, x, y = frame.canvas, frame.x, frame.y
    for tick in y.ticks(5 if narrow else 7):
        canvas.line(x.start, y(tick), x.end, y(tick), "grid")
        canvas.text(x.start - 6, y(tick) + 4, f"{tick:g}", "tick", "end")
    for tick in (0, 0.25, 0.5, 0.75, 1):
        canvas.text(x(tick), frame.bottom + 16, f"{100 * tick:g} %", "tick", "middle")
    canvas.text(x.start, frame.top - 26, "loss, nats per token" + (" (log scale)" if y.log else ""), "axis")
    canvas.text((x.start + x.end) / 2, frame.bottom + 34, "share of the job's own budget", "axis", "middle")
    labelled = x.start - GATE_LABEL_WIDTH
    for fraction in gates:
        canvas.line(x(fraction), frame.top - 16, x(fraction), frame.bottom, "gate-line")
        if x(fraction) - labelled >= GATE_LABEL_WIDTH:
            # above the edge, where curves that leave the frame run along
            canvas.text(x(fraction) + 4, frame.top - 8, "gate", "axis")
            labelled = x(fraction)


def _draw_job(frame: _Frame, row: JobRow, curve: Curve, *, is_winner: bool) -> tuple[float, float] | None:
    """Draw one job's lines and its end mark; returns where the mark stands."""
    fate = "winner" if is_winner else str(row.state)
    group = frame.canvas.group(f"job fate-{fate}", _hover_text(row, is_winner))
    smooth = curve.ema(EMA_ALPHA)
    for part in _finite_parts(zip(curve.train_steps, smooth, strict=True)):
        group.polyline(_thinned([_point(frame, curve, s, v) for s, v in part]), "train")
    points: list[tuple[float, float]] = []
    for part in _finite_parts(zip(curve.val_steps, curve.val_losses, strict=True)):
        points = [_point(frame, curve, s, v) for s, v in part]
        group.polyline(_thinned(points), "val-halo")
        group.polyline(_thinned(points), "val")
    last_step = max(curve.last_step, row.step if row.state.is_end else 0)
    if not last_step:
        return None
    finite_end = bool(curve.val_losses) and math.isfinite(curve.val_losses[-1])
    at_x = frame.x(last_step / curve.total_steps)
    at_y = points[-1][1] if points and finite_end else frame.top
    _end_mark(group, row.state, at_x, at_y)
    return at_x, at_y


def _end_mark(canvas: Canvas, state: JobState, x: float, y: float) -> None:
    """A shape for each fate, so that colour is not the only sign."""
    if state in (JobState.DIVERGING, JobState.FAILED):
        canvas.cross(x, y, 4, "mark-line")
    elif state is JobState.OVERFITTING:
        canvas.polygon([(x, y - 5), (x + 5, y + 4), (x - 5, y + 4)], "mark")
    elif state is JobState.UNDERPERFORMING:
        canvas.line(x, y - 5, x, y + 5, "mark-line")
    elif state is JobState.FINISHED:
        canvas.circle(x, y, 4, "mark")
    else:
        canvas.circle(x, y, 3.5, "mark-open")


def _draw_labels(frame: _Frame, ends: Sequence[tuple[JobRow, float, float]], winner: str | None, narrow: bool) -> None:
    """Names beside the frame, for the jobs that got to the end of it; the others are named on hover."""
    edge = frame.x.end - 2
    named = [(row, y) for row, x, y in ends if x >= edge or row.job_id == winner]
    named.sort(key=lambda pair: (pair[0].job_id != winner, pair[1]))
    named = sorted(named[:MAX_LABELS], key=lambda pair: -pair[1])
    heights = spread([y for _, y in named], LABEL_GAP, frame.top, frame.bottom)
    for (row, y), height in zip(named, heights, strict=True):
        is_winner = row.job_id == winner
        group = frame.canvas.group(f"fate-{'winner' if is_winner else row.state}")
        group.line(edge + 7, y, edge + 13, height, "leader")
        rate = wording.rate(row.job.learning_rate)
        text = (
            f"{rate} r{row.job.lora_rank}" if narrow else f"{rate} · r{row.job.lora_rank} · b{row.job.rows_per_update}"
        )
        group.text(edge + 15, height + 4, text, "label strong" if is_winner else "label")


def _hover_text(row: JobRow, is_winner: bool) -> str:
    head = f"{row.label} · {row.state}" + (" · winner" if is_winner else "")
    numbers = f"step {row.step} of {row.total_steps}, best validation loss {wording.loss(row.best_val_loss)}"
    return "\n".join(filter(None, (row.job_id, head, numbers, row.reason)))


def _point(frame: _Frame, curve: Curve, step: int, value: float) -> tuple[float, float]:
    return frame.x(step / curve.total_steps), frame.y(value)


def _finite_parts(series: Iterable[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """Stretches of finite values; a value that is no number breaks the line."""
    parts: list[list[tuple[int, float]]] = [[]]
    for step, value in series:
        if math.isfinite(value):
            parts[-1].append((step, value))
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def _thinned(points: Points) -> Points:
    """Every n-th point and the last."""
    stride = math.ceil(len(points) / MAX_POINTS)
    return points if stride <= 1 else [*points[:-1:stride], points[-1]]
