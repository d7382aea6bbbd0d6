"""Training states that ended tasks keep on disk, for `alto clean`. Adapters, curves and records are never touched."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from alto_core.containment import inside
from alto_core.domain import JobState, TaskState
from alto_core.parking import folder_bytes
from alto_core.settings import Settings
from alto_core.store import Store

NEEDED = (JobState.WAITING, JobState.RUNNING, JobState.CANCELLED, JobState.FAILED)
"""States of jobs that may still be continued with their task."""


@dataclass(frozen=True, kw_only=True)
class StoredState:
    """One job's training state."""

    task_id: str
    job_id: str
    job_state: JobState
    folder: Path
    num_bytes: int
    written_at: datetime


def stored_states(settings: Settings, task_id: str | None = None) -> list[StoredState]:
    """States of jobs that no resumed task would need, of one ended task or of all, the largest first.

    Raises:
        StoreError: there is no such task.
    """
    store = Store(settings)
    tasks = store.tasks() if task_id is None else (store.task(task_id),)
    found = []
    for task in tasks:
        for job in store.jobs(task.task_id) if task.state.is_end else ():
            folder = inside(settings.task_folder(task.task_id), "jobs", job.job_id, "state")
            is_needed = task.state is not TaskState.FINISHED and job.state in NEEDED
            if folder.is_dir() and not is_needed:
                written_at = datetime.fromtimestamp(folder.stat().st_mtime, UTC)
                found.append(
                    StoredState(
                        task_id=task.task_id,
                        job_id=job.job_id,
                        job_state=job.state,
                        folder=folder,
                        num_bytes=folder_bytes(folder),
                        written_at=written_at,
                    )
                )
    return sorted(found, key=lambda state: -state.num_bytes)


def free_states(states: Iterable[StoredState]) -> None:
    """Remove them. Their jobs can no longer be revived or audited."""
    for state in states:
        shutil.rmtree(state.folder)
