"""What the rest of ALTO asks of the store, with the rules of how tasks and jobs change state."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlmodel import col, select

from alto_core.config import TuningTask
from alto_core.domain import EARLY_EXITS, JobBudget, JobState, LoraJob, Stage, TaskState
from alto_core.errors import StoreError
from alto_core.outcomes import TaskProfile
from alto_core.redaction import without_secrets
from alto_core.scheduling.model_profile import ModelProfile
from alto_core.store.database import StorePart
from alto_core.store.records import EventDraft, EventRecord, JobRecord, JobUpdate, TaskRecord
from alto_core.store.rows import (
    add_job_rows,
    event_record,
    event_row,
    job_record,
    job_row,
    job_rows,
    new_task_row,
    open_task_row,
    set_known,
    task_record,
    task_row,
)
from alto_core.store.tables import EventRow, JobRow, ProfileRow, TaskNameRow, TaskRow


class Store(StorePart):
    """The store of one ALTO home, safe to use from several threads and processes.

    Raises:
        StoreError: the database cannot be opened, or another version of ALTO made it.
    """

    def new_task_id(self, name: str) -> str:
        """`name-1`, `name-2`, ...: no id is given twice, whoever asks."""
        with self._database.writing() as session:
            row = session.get(TaskNameRow, name.lower()) or TaskNameRow(name=name.lower(), last_number=0)
            row.last_number += 1
            session.add(row)
            return f"{name}-{row.last_number}"

    def add_task(
        self,
        task_id: str,
        task: TuningTask,
        jobs: Sequence[LoraJob] = (),
        budgets: Mapping[str, JobBudget] | None = None,
    ) -> None:
        """Queue a task. Its jobs may come later, by `add_jobs`, once the model is known.

        Raises:
            StoreError: the id is taken.
        """
        with self._database.writing() as session:
            if session.get(TaskRow, task_id) is not None:
                raise StoreError(f"task {task_id!r}: got an id that is taken, expected a new one from `new_task_id`")
            session.add(new_task_row(task_id, task, _now()))
            session.flush()
            add_job_rows(session, task_id, jobs, budgets or {})

    def add_jobs(self, task_id: str, jobs: Sequence[LoraJob], budgets: Mapping[str, JobBudget]) -> None:
        """Add the jobs of a task, with their budgets by job id. Those that are there stay as they are.

        Raises:
            StoreError: there is no such task.
        """
        with self._database.writing() as session:
            task_row(session, task_id)
            add_job_rows(session, task_id, jobs, budgets)

    def start_task(self, task_id: str) -> None:
        """Mark a queued task as running. A running one stays so: a flow may be started again.

        Raises:
            StoreError: there is no such task, or it has ended.
        """
        with self._database.writing() as session:
            row = open_task_row(session, task_id, "started")
            row.state = TaskState.RUNNING
            row.started_at = row.started_at or _now()
            session.add(row)

    def set_stage(self, task_id: str, stage: Stage) -> None:
        """Note that a stage began.

        Raises:
            StoreError: there is no such task, or it has ended.
        """
        with self._database.writing() as session:
            row = open_task_row(session, task_id, f"in stage {stage.value}")
            row.stage = stage
            session.add(row)

    def end_task(self, task_id: str, state: TaskState, message: str = "") -> None:
        """End a task, and cancel those of its jobs that have not ended. Ending it again the same way changes nothing.

        Raises:
            StoreError: there is no such task, or it ended otherwise.
        """
        assert state.is_end
        with self._database.writing() as session:
            if task_row(session, task_id).state == state:
                return
            row = open_task_row(session, task_id, state.value)
            row.state, row.message, row.ended_at = state, without_secrets(message), _now()
            session.add(row)
            reason = f"the task ended ({state.value})"
            for job in session.exec(select(JobRow).where(JobRow.task_id == task_id)):
                if not JobState(job.state).is_end:
                    job.state, job.reason = JobState.CANCELLED, reason
                    session.add(job)

    def reset_task(self, task_id: str, *, job_ids: Sequence[str] = ()) -> None:
        """Put a failed or cancelled task back into the queue, and these of its jobs back to waiting. The only way back.

        Raises:
            StoreError: there is no such task or job, or the task is not a failed or cancelled one.
        """
        with self._database.writing() as session:
            row = task_row(session, task_id)
            if row.state not in (TaskState.FAILED, TaskState.CANCELLED):
                raise StoreError(f"task {task_id}: got a {row.state} task to reset, expected a failed or cancelled one")
            row.state, row.message, row.ended_at = TaskState.QUEUED, "", None
            session.add(row)
            for job_id in job_ids:
                job = job_row(session, task_id, job_id)
                job.state, job.reason = JobState.WAITING, ""
                session.add(job)

    def set_task_fields(
        self,
        task_id: str,
        *,
        parent_run_id: str | None = None,
        flow_run_id: str | None = None,
        winner_job_id: str | None = None,
        registered_name: str | None = None,
        registered_version: int | None = None,
        report_path: str | None = None,
        result: Mapping[str, Any] | None = None,
    ) -> None:
        """Note what is known by now. None leaves a field as it is; `result` must be plain JSON values.

        Raises:
            StoreError: there is no such task.
        """
        fields = {
            "parent_run_id": parent_run_id,
            "flow_run_id": flow_run_id,
            "winner_job_id": winner_job_id,
            "registered_name": registered_name,
            "registered_version": registered_version,
            "report_path": report_path,
            "result": None if result is None else json.dumps(dict(result)),
        }
        with self._database.writing() as session:
            row = task_row(session, task_id)
            set_known(row, fields)
            session.add(row)

    def tasks(self, limit: int | None = None) -> tuple[TaskRecord, ...]:
        """The tasks, newest first."""
        query = select(TaskRow).order_by(col(TaskRow.created_at).desc(), col(TaskRow.task_id).desc()).limit(limit)
        with self._database.reading() as session:
            return tuple(task_record(row) for row in session.exec(query))

    def has_task(self, task_id: str) -> bool:
        """Whether there is a task of this id."""
        with self._database.reading() as session:
            return session.get(TaskRow, task_id) is not None

    def open_tasks(self) -> tuple[TaskRecord, ...]:
        """The tasks that have not ended, oldest first."""
        open_states = [state for state in TaskState if not state.is_end]
        query = select(TaskRow).where(col(TaskRow.state).in_(open_states)).order_by(col(TaskRow.created_at))
        with self._database.reading() as session:
            return tuple(task_record(row) for row in session.exec(query))

    def task(self, task_id: str) -> TaskRecord:
        """One task.

        Raises:
            StoreError: there is none of that id; names the nearest ones.
        """
        with self._database.reading() as session:
            return task_record(task_row(session, task_id))

    def jobs(self, task_id: str) -> tuple[JobRecord, ...]:
        """The jobs of a task, in the order of its search space.

        Raises:
            StoreError: there is no such task.
        """
        query = select(JobRow).where(JobRow.task_id == task_id).order_by(col(JobRow.position))
        with self._database.reading() as session:
            task_row(session, task_id)
            return tuple(job_record(row) for row in session.exec(query))

    def update_jobs(self, task_id: str, updates: Sequence[JobUpdate]) -> None:
        """Note what changed about jobs; all of it or, if one change is refused, nothing.

        Raises:
            StoreError: there is no such task or job, or an ended job would change its state.
        """
        if not updates:
            return
        with self._database.writing() as session:
            rows = job_rows(session, task_id, [update.job_id for update in updates])
            for update in updates:
                row = rows[update.job_id]
                if JobState(row.state).is_end and update.state not in (None, row.state):
                    raise StoreError(
                        f"job {update.job_id} of task {task_id}: got state {update.state} for a job that ended as "
                        f"{row.state}, expected no change. Reset the task to run it again."
                    )
                set_known(row, {k: v for k, v in vars(update).items() if k != "job_id"})
                if update.reason is not None:
                    row.reason = without_secrets(update.reason)
                session.add(row)

    def reopen_job(self, task_id: str, job_id: str) -> None:
        """Let a job that a policy ended run again.

        Raises:
            StoreError: there is no such task or job, or it did not end early.
        """
        with self._database.writing() as session:
            row = job_row(session, task_id, job_id)
            if row.state not in EARLY_EXITS:
                raise StoreError(
                    f"job {job_id} of task {task_id}: got a {row.state} job to run again, expected one that ended early"
                )
            row.state, row.reason = JobState.RUNNING, ""
            session.add(row)

    def append_events(self, task_id: str, events: Sequence[EventDraft]) -> None:
        """Add to the log of a task.

        Raises:
            StoreError: there is no such task.
        """
        now = _now()
        with self._database.writing() as session:
            task_row(session, task_id)
            for draft in events:
                session.add(event_row(task_id, draft, now))

    def events(self, task_id: str, after_id: int = 0) -> tuple[EventRecord, ...]:
        """The log of a task in order, from behind the event `after_id`.

        Raises:
            StoreError: there is no such task.
        """
        query = select(EventRow).where(EventRow.task_id == task_id, col(EventRow.event_id) > after_id)
        with self._database.reading() as session:
            task_row(session, task_id)
            return tuple(event_record(row) for row in session.exec(query.order_by(col(EventRow.event_id))))

    def save_profile(self, key: str, profile: TaskProfile) -> None:
        """Keep a measured profile under a key, in place of an older one."""
        with self._database.writing() as session:
            session.merge(ProfileRow(key=key, profile=json.dumps(dataclasses.asdict(profile))))

    def profile(self, key: str) -> TaskProfile | None:
        """The profile kept under a key."""
        with self._database.reading() as session:
            row = session.get(ProfileRow, key)
            return None if row is None else TaskProfile(**json.loads(row.profile))

    def save_model_profile(self, key: str, profile: ModelProfile) -> None:
        """Keep what was measured of a model on a device, in place of an older measurement."""
        with self._database.writing() as session:
            session.merge(ProfileRow(key=key, profile=profile.to_json()))

    def model_profile(self, key: str) -> ModelProfile | None:
        """What was measured under a key of `profiling.profile_key`."""
        with self._database.reading() as session:
            row = session.get(ProfileRow, key)
            return None if row is None else ModelProfile.from_json(row.profile)


def _now() -> datetime:
    return datetime.now(UTC)
