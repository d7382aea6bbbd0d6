"""A plan as a Gantt chart: one row per GPU, time to the right. As text, as SVG, and as a page of its own."""

from __future__ import annotations

import html
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from alto_core import wording
from alto_core.report.svg import Canvas, Scale
from alto_core.store import KeptPlacement

SIGNS = string.ascii_letters + string.digits
ROW, LEFT, TOP, WIDTH, FOOT = 22, 150, 8, 960, 26
HUES = (211, 28, 134, 340, 48, 265, 175, 0, 90, 300)
STYLE = (
    "svg{background:#fff;font:12px system-ui,sans-serif}text{fill:#333}.faint{stroke:#ddd}.host{stroke:#999}"
    + "".join(f".h{i}{{fill:hsl({hue} 55% 72%);stroke:hsl({hue} 45% 45%)}}" for i, hue in enumerate(HUES))
)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A task on one GPU."""

    task_id: str
    host_id: str
    gpu: int
    start: float
    """Seconds from the moment of the plan; what runs already starts at 0."""
    end: float


def bars_of(placements: Sequence[KeptPlacement], now: datetime) -> tuple[Bar, ...]:
    """One bar for each GPU of each placement, in the order of hosts, GPUs and starts."""
    bars = [
        Bar(
            task_id=placement.task_id,
            host_id=placement.host_id,
            gpu=gpu,
            start=max(0.0, (placement.start - now).total_seconds()),
            end=(placement.end - now).total_seconds(),
        )
        for placement in placements
        for gpu in placement.gpus
    ]
    return tuple(sorted(bars, key=lambda bar: (bar.host_id, bar.gpu, bar.start)))


def gantt_text(bars: Sequence[Bar], width: int) -> list[str]:
    """Lines for a terminal: each task is a letter, named below."""
    if not bars:
        return []
    rows = _rows(bars)
    label = max(len(f"{host_id} {gpu}") for host_id, gpu in rows)
    columns = max(10, width - label - 3)
    last = max(bar.end for bar in bars)
    signs = {task_id: SIGNS[i % len(SIGNS)] for i, task_id in enumerate(dict.fromkeys(bar.task_id for bar in bars))}
    lines = []
    for (host_id, gpu), own in rows.items():
        cells = ["."] * columns
        for bar in own:
            first = min(columns - 1, int(bar.start / last * columns))
            for column in range(first, max(first + 1, round(bar.end / last * columns))):
                cells[min(column, columns - 1)] = signs[bar.task_id]
        lines.append(f"{f'{host_id} {gpu}':<{label}} |{''.join(cells)}|")
    lines.append(f"{'':<{label}}  now{wording.duration(last):>{columns - 3}}")
    ends = {bar.task_id: (bar.start, bar.end) for bar in bars}
    for task_id, sign in signs.items():
        start, end = ends[task_id]
        begun = "runs" if start == 0 else f"in {wording.duration(start)}"
        lines.append(f"{sign}  {task_id}: {begun}, ends in {wording.duration(end)} at the latest")
    return lines


def gantt_svg(bars: Sequence[Bar]) -> str:
    """A picture that stands alone."""
    rows = _rows(bars)
    canvas = Canvas(WIDTH, TOP + ROW * max(1, len(rows)) + FOOT, "Plan of the cluster: GPUs over time")
    last = max((bar.end for bar in bars), default=1.0)
    scale = Scale(low=0, high=last / 60, start=LEFT, end=WIDTH - 20)
    bottom = TOP + ROW * len(rows)
    for minutes in scale.ticks(8):
        canvas.line(scale(minutes), TOP, scale(minutes), bottom, "faint")
        canvas.text(scale(minutes), bottom + 16, wording.duration(minutes * 60), anchor="middle")
    hue = {task_id: i % len(HUES) for i, task_id in enumerate(dict.fromkeys(bar.task_id for bar in bars))}
    host_before = ""
    for row, ((host_id, gpu), own) in enumerate(rows.items()):
        y = TOP + ROW * row
        if host_id != host_before:
            canvas.line(0, y, WIDTH, y, "host")
            host_before = host_id
        canvas.text(4, y + 15, f"{host_id[:16]}  GPU {gpu}")
        for bar in own:
            x, end = scale(bar.start / 60), scale(bar.end / 60)
            title = f"{bar.task_id}: {wording.duration(bar.start)} to {wording.duration(bar.end)} from now"
            canvas.rect(x, y + 2, max(2.0, end - x), ROW - 4, f"h{hue[bar.task_id]}", title, radius=3)
            letters = int((end - x - 8) / 7)
            if letters >= 3:
                canvas.text(x + 4, y + 15, bar.task_id[:letters])
    opening, rest = canvas.render().split(">", 1)
    return f"{opening}><style>{STYLE}</style>{rest}"


def gantt_page(bars: Sequence[Bar], summary: str, refusals: Mapping[str, str]) -> str:
    """An HTML page with the picture, its summary, and the tasks that cannot be planned."""
    refused = "".join(
        f"<li><b>{html.escape(task_id)}</b> cannot be planned: {html.escape(reason)}</li>"
        for task_id, reason in refusals.items()
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Plan</title>'
        '<meta name="viewport" content="width=device-width"><style>body{font:14px system-ui,sans-serif;margin:24px;'
        "max-width:1100px}svg{width:100%}</style><h1>Plan of the cluster</h1>"
        f"<p>{html.escape(summary)}</p>{gantt_svg(bars)}<ul>{refused}</ul></html>\n"
    )


def _rows(bars: Sequence[Bar]) -> dict[tuple[str, int], list[Bar]]:
    rows: dict[tuple[str, int], list[Bar]] = {}
    for bar in bars:
        rows.setdefault((bar.host_id, bar.gpu), []).append(bar)
    return rows
