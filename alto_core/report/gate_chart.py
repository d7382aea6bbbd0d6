"""The ranking at a gate: validation loss of each job there, kept or ended, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from alto_core import wording
from alto_core.domain import GateEntry
from alto_core.report.svg import Canvas, Scale
from alto_core.report.values import JobRow
from alto_core.result import GateRecord

REASON_TEXT: Mapping[str, str] = {
    "top": "kept: among the best",
    **{reason: f"kept: {why}" for reason, why in wording.KEPT_BECAUSE.items()},
    "rank": "ended: others were better",
}
REVIVED_TEXT = "ended, revived later"
ROW_HEIGHT = 22.0


def gate_chart(gate: GateRecord, jobs: Sequence[JobRow], *, width: float) -> str:
    """One line per job, best first; jobs that had ended before the gate come last, without a dot."""
    rows = {row.job_id: row for row in jobs}
    ranked = sorted((e for e in gate.entries if e.gate_rank is not None), key=lambda e: e.gate_rank or 0)
    unranked = [e for e in gate.entries if e.gate_rank is None]
    narrow = width < 560
    left, right = (112.0, 92.0) if narrow else (176.0, 272.0)
    canvas = Canvas(width, 30 + ROW_HEIGHT * len(gate.entries), "Validation loss of each job at the gate")
    scale = _scale(ranked, left, width - right)
    if scale is not None:
        for tick in scale.ticks(3 if narrow else 6):
            canvas.line(scale(tick), 20, scale(tick), canvas.height - 4, "grid")
            canvas.text(scale(tick), 14, f"{tick:g}", "tick", "middle")
    canvas.text(left - 12, 14, "validation loss", "axis", "end")
    for i, entry in enumerate([*ranked, *unranked]):
        _draw_entry(canvas, entry, rows.get(entry.job_id), scale, 30 + ROW_HEIGHT * (i + 0.5), narrow)
    return canvas.render()


def _draw_entry(
    canvas: Canvas, entry: GateEntry, row: JobRow | None, scale: Scale | None, y: float, narrow: bool
) -> None:
    left = 112.0 if narrow else 176.0
    name = entry.job_id if row is None else row.label
    css = "gate-kept" if entry.kept else "gate-ended"
    place = "" if entry.gate_rank is None else f"{entry.gate_rank}"
    was_revived = row is not None and row.was_revived_after(entry)
    reason = REVIVED_TEXT if was_revived else REASON_TEXT.get(entry.reason, f"ended before: {entry.reason}")
    group = canvas.group(css, f"{entry.job_id}\n{reason}\nvalidation loss {wording.loss(entry.val_loss)}")
    group.text(18, y + 4, place, "tick", "end")
    group.text(26, y + 4, name.replace("lr ", "").replace(" · ", " ") if narrow else name, "label")
    if scale is not None and entry.gate_rank is not None and entry.val_loss is not None:
        at = scale(entry.val_loss)
        group.line(left, y, at, y, "stem")
        group.circle(at, y, 5, "mark" if entry.kept else "mark-open")
    if narrow:
        short = (
            "kept" if entry.kept else "earlier" if entry.gate_rank is None else "revived" if was_revived else "ended"
        )
        group.text(canvas.width - 80, y + 4, short, "label")
        return
    if entry.gate_rank is not None:
        group.text(canvas.width - 204, y + 4, wording.loss(entry.val_loss), "label", "end")
    group.text(canvas.width - 192, y + 4, reason, "label")


def _scale(ranked: Sequence[GateEntry], start: float, end: float) -> Scale | None:
    losses = sorted(e.val_loss for e in ranked if e.val_loss is not None and math.isfinite(e.val_loss))
    if not losses:
        return None
    # a lone high loss would press all the others into one corner; it is drawn at the edge instead
    high = min(losses[-1], 3 * losses[len(losses) // 2])
    margin = 0.08 * (high - losses[0]) or 0.05 * abs(high) or 1.0
    return Scale(low=losses[0] - margin, high=high + margin, start=start, end=end)
