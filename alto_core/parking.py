"""Parked jobs: what a job that ended early leaves on disk so that it can go on, and how much disk that may take.

A parked job is its folder: `state` (adapter, moments, step, best adapter so far) and `adapter` (the best, in PEFT
format). Row order and dropout are functions of the step, and the detectors' counts are read off the curve, so nothing
else is needed to go on as if the job had never stopped. Thinning removes `state` and leaves the adapter.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from alto_core.domain import EARLY_EXITS, JobState
from alto_core.errors import StoreError
from alto_core.job_run import JobRun
from alto_core.store import JobRecord
from alto_core.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class ParkedJob:
    """One job that ended early."""

    record: JobRecord
    folder: Path
    state_bytes: int
    """On disk; 0 when only its adapter was kept."""
    parked_at: datetime | None
    """When its state was written."""

    @property
    def job_id(self) -> str:
        return self.record.job_id

    @property
    def can_go_on(self) -> bool:
        return self.state_bytes > 0


def parked_jobs(workspace: Workspace) -> tuple[ParkedJob, ...]:
    """The jobs of a task that ended early, the one with the lowest validation loss first."""
    parked = []
    for record in workspace.records().values():
        if record.state in EARLY_EXITS:
            state = workspace.job_folder(record.job_id) / "state"
            parked.append(
                ParkedJob(
                    record=record,
                    folder=workspace.job_folder(record.job_id),
                    state_bytes=folder_bytes(state),
                    parked_at=datetime.fromtimestamp(state.stat().st_mtime, UTC) if state.is_dir() else None,
                )
            )
    return tuple(sorted(parked, key=lambda job: (_loss(job.record), job.job_id)))


def thin_to_budget(workspace: Workspace) -> tuple[ParkedJob, ...]:
    """Keep the states of the best parked jobs within the task's disk budget, and of the others the adapter alone.

    Returns:
        The jobs whose state was removed.
    """
    left = workspace.task.early_exit.parked_gib * 2**30
    thinned = []
    for job in parked_jobs(workspace):
        if job.state_bytes <= left:
            left -= job.state_bytes
        else:
            thin(job)
            thinned.append(job)
    return tuple(thinned)


def thin(job: ParkedJob) -> None:
    """Remove the state; the adapter stays."""
    shutil.rmtree(job.folder / "state", ignore_errors=True)


def reserve(workspace: Workspace, *, until: float) -> tuple[JobRun, ...]:
    """Jobs that may take the slot of a survivor that dies, the best first: those that were ended by rank alone."""
    parked = [job for job in parked_jobs(workspace) if job.record.state is JobState.UNDERPERFORMING and job.can_go_on]
    return workspace.stretches([job.job_id for job in parked], until=until)


def require_parked(workspace: Workspace, job_ids: Sequence[str]) -> None:
    """Refuse jobs that cannot go on.

    Raises:
        StoreError: no such job, one that did not end early, or one of which only the adapter was kept.
    """
    records = workspace.records()
    parked = {job.job_id: job for job in parked_jobs(workspace)}
    able = ", ".join(job_id for job_id, job in parked.items() if job.can_go_on) or "none"
    for job_id in job_ids:
        if job_id not in parked:
            state = records[job_id].state if job_id in records else "an unknown id"
            raise StoreError(
                f"job {job_id!r} of task {workspace.task_id}: got {state}, expected a job that ended early. Those that "
                f"can go on: {able}."
            )
        if not parked[job_id].can_go_on:
            raise StoreError(
                f"job {job_id} of task {workspace.task_id}: only its adapter was kept, expected its state too. Those "
                f"that can go on: {able}. early_exit.parked_gib sets how many states are kept."
            )


def folder_bytes(folder: Path) -> int:
    """Size of all files under a folder; 0 where there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


def _loss(record: JobRecord) -> float:
    loss = record.best_val_loss
    return math.inf if loss is None or not math.isfinite(loss) else loss
