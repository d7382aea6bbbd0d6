"""From a task's records and curves to `ReportData`, and from there to a file. Only here the report meets the rooms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from alto_core import wording
from alto_core.data.report import DataReport
from alto_core.report.page import render_page
from alto_core.report.values import ExitTime, JobRow, LogLine, ReportData, StageTime, TaskFacts
from alto_core.result import TaskResult
from alto_core.settings import Settings
from alto_core.store import EventRecord, JobRecord, Store, TaskRecord
from alto_core.whole_files import whole_file

if TYPE_CHECKING:
    from alto_core.early_exit.curves import Curve

LOGGED_KINDS = ("stage", "forecast", "gate", "exit", "score", "registered", "warning", "error")
"""Events that decide something, explain what was decided, or say what was expected."""


def build_report(task_id: str, settings: Settings, out: Path | None = None) -> Path:
    """Write the report of a task, running or ended, as one HTML file that needs no network.

    Args:
        task_id: the task.
        settings: where the store and MLflow are.
        out: the file to write; None: `report.html` in the task's folder.

    Returns:
        The absolute path of the file.

    Raises:
        StoreError: there is no such task.
        TrackingError: the curves cannot be read.
    """
    page = render_page(load_report(task_id, settings))
    path = (out or settings.task_folder(task_id) / "report.html").resolve()
    with whole_file(path) as file:
        file.write_text(page, encoding="utf-8")
    return path


def load_report(task_id: str, settings: Settings) -> ReportData:
    """Collect what a report shows, from the store and, in one bulk read, from MLflow."""
    # Here, since it imports MLflow, which takes seconds that `alto status` does not need.
    from alto_core.tracking import Tracker

    store = Store(settings)
    record, jobs, events = store.task(task_id), job_rows(store.jobs(task_id)), store.events(task_id)
    curves: Mapping[str, Curve] = {}
    if record.parent_run_id:
        curves = Tracker(settings).task_runs(task_id).read_curves([row.job_id for row in jobs])
    profile = store.profile(task_id)
    return report_data(record, jobs, events, curves, device=profile.device if profile else None)


def report_data(
    record: TaskRecord,
    jobs: Sequence[JobRow],
    events: Sequence[EventRecord],
    curves: Mapping[str, Curve],
    *,
    device: str | None = None,
) -> ReportData:
    """Put a task's records together. Pure."""
    result = TaskResult.from_dict(record.result or {})
    started = record.started_at or record.created_at
    return ReportData(
        facts=_facts(record),
        jobs=tuple(jobs),
        curves=curves,
        result=result,
        stages=tuple(
            StageTime(stage=event.text, seconds=(event.at - started).total_seconds())
            for event in events
            if event.kind == "stage"
        ),
        exits=tuple(
            ExitTime(job_id=event.job_id, seconds=(event.at - started).total_seconds())
            for event in events
            if event.kind == "exit" and event.job_id
        ),
        log=tuple(
            LogLine(seconds=(event.at - started).total_seconds(), kind=event.kind, job_id=event.job_id, text=event.text)
            for event in events
            if event.kind in LOGGED_KINDS and event.text
        ),
        device=device,
        warnings=tuple(event.text for event in events if event.kind == "warning" and event.text),
        tokens_per_second=result.tokens_per_second or _median_speed(events),
        data_table=DataReport.from_dict(result.data_report).as_text() if result.data_report else "",
    )


def job_rows(records: Sequence[JobRecord]) -> tuple[JobRow, ...]:
    """The store's job records as readers see them."""
    return tuple(
        JobRow(
            job=record.job,
            state=record.state,
            total_steps=record.total_steps,
            warmup_steps=record.warmup_steps,
            step=record.step,
            reason=record.reason,
            train_loss=record.train_loss,
            val_loss=record.val_loss,
            best_val_loss=record.best_val_loss,
            best_step=record.best_step,
            gate_rank=record.gate_rank,
        )
        for record in records
    )


def _facts(record: TaskRecord) -> TaskFacts:
    task = record.task
    return TaskFacts(
        task_id=record.task_id,
        name=record.name,
        owner=record.owner,
        state=record.state,
        model=wording.short_name(task.model.name),
        data=wording.short_name(task.data.source),
        metric=task.evaluation.metric,
        choose_by=task.evaluation.choose_by,
        task_digest=record.digest,
        task_file=yaml.safe_dump(task.model_dump(mode="json"), sort_keys=False, allow_unicode=True),
        message=record.message,
        created=record.created_at,
        started=record.started_at,
        ended=record.ended_at,
        parent_run_id=record.parent_run_id,
    )


def _median_speed(events: Sequence[EventRecord]) -> float | None:
    speeds = sorted(
        e.numbers["tokens_per_second"] for e in events if e.kind == "progress" and "tokens_per_second" in e.numbers
    )
    return speeds[len(speeds) // 2] if speeds else None
