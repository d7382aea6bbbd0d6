"""The frozen values that go into the store and come out of it. Never live rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from alto_core.config import TuningTask, parse_task
from alto_core.domain import JobState, LoraJob, Stage, TaskState
from alto_core.errors import StoreError


@dataclass(frozen=True, kw_only=True)
class TaskRecord:
    """One tuning task. All times are UTC."""

    task_id: str
    name: str
    owner: str
    state: TaskState
    stage: Stage | None
    """The stage that began last; None before the first."""
    digest: str
    content: str
    """The task file as JSON."""
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    message: str
    """Why the task ended as it did; empty when there is nothing to say."""
    parent_run_id: str | None
    """MLflow run of the task."""
    flow_run_id: str | None
    """Prefect flow run."""
    winner_job_id: str | None
    registered_name: str | None
    registered_version: int | None
    report_path: str | None
    result: Mapping[str, Any] | None
    """What the task came to, as plain values."""

    @property
    def task(self) -> TuningTask:
        """The checked task file.

        Raises:
            TaskFileError: this version of ALTO no longer accepts what an older one stored.
        """
        return parse_task(json.loads(self.content), file=f"task {self.task_id}")

    def require_unfinished(self) -> None:
        """Go on only with a task that has something left to do.

        Raises:
            StoreError: it has finished, its report included.
        """
        if self.state is TaskState.FINISHED and self.report_path is not None:
            raise StoreError(f"task {self.task_id} has finished, expected one with something left to do.")


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """One job of a task as it stands."""

    task_id: str
    job_id: str
    job: LoraJob
    state: JobState
    reason: str
    step: int
    """Optimizer steps made."""
    total_steps: int
    warmup_steps: int
    train_loss: float | None
    val_loss: float | None
    best_val_loss: float | None
    best_step: int | None
    gate_rank: int | None
    run_id: str | None
    """MLflow run of the job."""


@dataclass(frozen=True, kw_only=True)
class JobUpdate:
    """What changed about one job. None leaves a field as it is."""

    job_id: str
    state: JobState | None = None
    reason: str | None = None
    step: int | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    best_val_loss: float | None = None
    best_step: int | None = None
    gate_rank: int | None = None
    run_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class EventDraft:
    """Something that happened, for the log of a task."""

    kind: str
    """A word to filter by, for example `stage`, `exit`, `gate`."""
    text: str
    """One sentence for people."""
    job_id: str | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    """The numbers in it, by name; may be NaN or infinite."""


@dataclass(frozen=True, kw_only=True)
class EventRecord:
    """A logged event. Ids rise in the order of logging, over all tasks."""

    event_id: int
    task_id: str
    at: datetime
    kind: str
    text: str
    job_id: str | None
    numbers: Mapping[str, float]
