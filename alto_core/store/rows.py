"""Between rows and values: finding rows, filling them, and turning them into records."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlmodel import Session, SQLModel, col, select

from alto_core.config import TuningTask
from alto_core.domain import JobBudget, JobState, LoraJob, Stage, TaskState
from alto_core.errors import StoreError
from alto_core.redaction import without_secrets
from alto_core.store.records import EventDraft, EventRecord, JobRecord, TaskRecord
from alto_core.store.tables import EventRow, JobRow, TaskRow


def task_row(session: Session, task_id: str) -> TaskRow:
    """The row of a task.

    Raises:
        StoreError: there is none; names the nearest ids, or the newest.
    """
    row = session.get(TaskRow, task_id)
    if row is not None:
        return row
    known = session.exec(select(TaskRow.task_id).order_by(col(TaskRow.created_at).desc())).all()
    near = difflib.get_close_matches(task_id, known, n=3) or known[:3]
    hint = f"Did you mean {' or '.join(near)}?" if near else "There is no task yet."
    raise StoreError(
        f"task {task_id!r}: got an unknown id, expected one of the {len(known)} tasks in the store. {hint}"
    )


def open_task_row(session: Session, task_id: str, wanted: str) -> TaskRow:
    """The row of a task that has not ended.

    Args:
        wanted: what the task was to become, for the message.

    Raises:
        StoreError: there is none, or it has ended.
    """
    row = task_row(session, task_id)
    if TaskState(row.state).is_end:
        raise StoreError(
            f"task {task_id}: got a task that ended as {row.state} to be {wanted}, expected a queued or running one. "
            "Reset it first."
        )
    return row


def new_task_row(task_id: str, task: TuningTask, now: datetime) -> TaskRow:
    """The row of a task that is queued now."""
    return TaskRow(
        task_id=task_id,
        name=task.name,
        owner=task.owner,
        state=TaskState.QUEUED,
        digest=task.digest,
        content=json.dumps(task.model_dump(mode="json")),
        created_at=now,
    )


def job_row(session: Session, task_id: str, job_id: str) -> JobRow:
    """The row of a job.

    Raises:
        StoreError: there is none.
    """
    row = session.get(JobRow, (task_id, job_id))
    if row is None:
        task_row(session, task_id)
        raise StoreError(f"job {job_id!r}: got an unknown id, expected one of the jobs of task {task_id}")
    return row


def job_rows(session: Session, task_id: str, job_ids: Sequence[str]) -> dict[str, JobRow]:
    """The rows of jobs by id, read in one query.

    Raises:
        StoreError: one of them is not there.
    """
    query = select(JobRow).where(JobRow.task_id == task_id, col(JobRow.job_id).in_(job_ids))
    rows = {row.job_id: row for row in session.exec(query)}
    return {job_id: rows.get(job_id) or job_row(session, task_id, job_id) for job_id in job_ids}


def add_job_rows(session: Session, task_id: str, jobs: Sequence[LoraJob], budgets: Mapping[str, JobBudget]) -> None:
    """Add the jobs that are not there yet."""
    for position, job in enumerate(jobs):
        if session.get(JobRow, (task_id, job.job_id)) is None:
            budget = budgets[job.job_id]
            row = JobRow(
                task_id=task_id,
                job_id=job.job_id,
                position=position,
                params=json.dumps(dataclasses.asdict(job)),
                state=JobState.WAITING,
                total_steps=budget.total_steps,
                warmup_steps=budget.warmup_steps,
            )
            session.add(row)


def set_known(row: SQLModel, fields: Mapping[str, Any]) -> None:
    """Set the fields that are not None."""
    for name, value in fields.items():
        if value is not None:
            setattr(row, name, value)


def task_record(row: TaskRow) -> TaskRecord:
    fields = row.model_dump()
    fields["state"] = TaskState(row.state)
    fields["stage"] = row.stage and Stage(row.stage)
    fields["result"] = None if row.result is None else json.loads(row.result)
    return TaskRecord(**fields)


def job_record(row: JobRow) -> JobRecord:
    fields = row.model_dump(exclude={"position", "params"})
    params = json.loads(row.params)
    job = LoraJob(**{**params, "target_modules": tuple(params["target_modules"])})
    return JobRecord(**{**fields, "state": JobState(row.state)}, job=job)


def event_row(task_id: str, draft: EventDraft, now: datetime) -> EventRow:
    # text, because JSON has no NaN and no infinity
    numbers = json.dumps({name: repr(float(value)) for name, value in draft.numbers.items()})
    text = without_secrets(draft.text)
    return EventRow(task_id=task_id, at=now, kind=draft.kind, text=text, job_id=draft.job_id, numbers=numbers)


def event_record(row: EventRow) -> EventRecord:
    fields = row.model_dump()
    fields["numbers"] = {name: float(value) for name, value in json.loads(row.numbers).items()}
    return EventRecord(**fields)
