"""A task as lines of text: one per event for people and logs, one JSON object per event for machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from alto_core import wording
from alto_core.report import JobRow
from alto_core.store import EventRecord
from flows.cli.output import dump

SILENT_KINDS = ("progress", "tracking")
"""They come often and say nothing without their numbers."""
NAMED_KINDS = ("gate", "scoring", "score", "registered", "warning", "error")
"""Their text does not say what it is about."""


def plain_lines(events: Sequence[EventRecord], jobs: Sequence[JobRow], started: datetime) -> Iterator[str]:
    """One line per event; evaluations of one moment are one line."""
    rows = {row.job_id: row for row in jobs}
    evaluations: list[EventRecord] = []
    for event in events:
        if evaluations and (event.kind != "evaluation" or event.at != evaluations[-1].at):
            yield _stamped(evaluations[-1], started, _summary(evaluations))
            evaluations = []
        if event.kind == "evaluation":
            evaluations.append(event)
        elif event.kind not in SILENT_KINDS and (event.text or event.job_id):
            yield _stamped(event, started, describe(event, rows.get(event.job_id or "")))
    if evaluations:
        yield _stamped(evaluations[-1], started, _summary(evaluations))


def describe(event: EventRecord, row: JobRow | None) -> str:
    """One event in words."""
    if event.kind == "stage":
        return f"stage {event.text}"
    if event.kind == "exit":
        step = event.numbers.get("step")
        where = f" at step {step:.0f}" + (f" of {row.total_steps}" if row else "") if step is not None else ""
        return f"{event.job_id} ended{where}, {event.text}"
    if event.kind == "evaluation":
        return _summary([event])
    head = f"{event.kind}: " if event.kind in NAMED_KINDS else ""
    # a score's text names its job already
    job = f"{event.job_id} " if event.job_id and event.kind not in NAMED_KINDS else ""
    return f"{head}{job}{event.text}"


def json_line(event: EventRecord) -> str:
    """One event as a JSON object; numbers that are not finite become null."""
    return dump(
        {
            "event": event.kind,
            "task_id": event.task_id,
            "at": event.at.isoformat(),
            "job_id": event.job_id,
            "text": event.text,
            "numbers": dict(event.numbers),
        }
    )


def _summary(evaluations: Sequence[EventRecord]) -> str:
    best = min(evaluations, key=_val_loss)
    value = best.numbers.get("val_loss")
    step = best.numbers.get("step", 0)
    what = f"{best.job_id} at step {step:.0f}, validation loss {wording.loss(value)}"
    jobs = len({event.job_id for event in evaluations})
    return f"evaluated {what}" if jobs == 1 else f"evaluated {jobs} jobs, best {what}"


def _val_loss(event: EventRecord) -> float:
    value = event.numbers.get("val_loss")
    return float("inf") if value is None or value != value else value


def _stamped(event: EventRecord, started: datetime, text: str) -> str:
    seconds = max(0, int((event.at - started).total_seconds()))
    return f"[{seconds // 60:02d}:{seconds % 60:02d}] {' '.join(text.split())}"
