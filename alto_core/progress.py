"""What the store is told at each boundary of a training: steps, losses, shortages, speed, and the time left."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from alto_core.domain import Boundary, JobState
from alto_core.early_exit.curves import Curve
from alto_core.scheduling.prediction import seconds_left
from alto_core.store import EventDraft, JobUpdate, Store


class Progress:
    """Of one stretch of training, which begins when this is made.

    Args:
        task_id: the task.
        store: where to write.
        savings: share of the training rows that early exit is expected to spare, for the time left.
        evaluated: last step whose evaluation an earlier run has told, by job id.
    """

    def __init__(self, task_id: str, store: Store, *, savings: float, evaluated: Mapping[str, int]):
        self._task_id, self._store, self._savings, self._evaluated = task_id, store, savings, evaluated
        self._started, self._rows_before = time.monotonic(), self._count_rows().trained

    def note_steps(self, boundary: Boundary, recorded: Collection[str]) -> None:
        """Where the jobs stand, and where memory ran out; a job that had to go waits again.

        Args:
            boundary: what was measured.
            recorded: jobs whose end is recorded already, by an earlier run: they train again as company alone.
        """
        last = {record.job_id: record for record in boundary.steps}
        val_loss = {evaluation.job_id: evaluation.val_loss for evaluation in boundary.evaluations}
        self._store.update_jobs(
            self._task_id,
            [
                JobUpdate(
                    job_id=job_id,
                    state=JobState.RUNNING,
                    step=record.step,
                    train_loss=record.train_loss,
                    val_loss=val_loss.get(job_id),
                )
                for job_id, record in last.items()
                if job_id not in recorded
            ],
        )
        evicted = {shortage.evicted_job_id for shortage in boundary.shortages} - {None, *boundary.running, *recorded}
        self._store.update_jobs(
            self._task_id,
            [JobUpdate(job_id=job_id, state=JobState.WAITING) for job_id in sorted(filter(None, evicted))],
        )
        self._store.append_events(
            self._task_id,
            [
                EventDraft(
                    kind="memory",
                    job_id=shortage.evicted_job_id,
                    text=shortage.text,
                    numbers={"max_pass_tokens": shortage.max_pass_tokens},
                )
                for shortage in boundary.shortages
            ],
        )

    def note_curves(self, boundary: Boundary, curves: Sequence[Curve]) -> None:
        """The best losses so far of these jobs, and the evaluations."""
        best = [
            JobUpdate(job_id=curve.job_id, best_step=curve.best_val_step, best_val_loss=curve.best_val)
            for curve in curves
        ]
        self._store.update_jobs(self._task_id, best)
        last = {record.job_id: record for record in boundary.steps}
        self._store.append_events(
            self._task_id,
            [
                EventDraft(
                    kind="evaluation",
                    text=f"validation loss {evaluation.val_loss:.4f} after step {evaluation.step}",
                    job_id=evaluation.job_id,
                    numbers={
                        "step": evaluation.step,
                        "fraction": evaluation.fraction,
                        "val_loss": evaluation.val_loss,
                        "train_loss": last[evaluation.job_id].train_loss if evaluation.job_id in last else math.nan,
                    },
                )
                for evaluation in boundary.evaluations
                if evaluation.step > self._evaluated.get(evaluation.job_id, 0)
            ],
        )

    def note_speed(self, boundary: Boundary) -> None:
        """Speed, and the time that the rest is expected to take at it."""
        rows, speed = self._count_rows(), boundary.tokens_per_second
        numbers = {
            "tokens_per_second": speed,
            "step_seconds": boundary.step_seconds,
            "evaluation_seconds": boundary.evaluation_seconds,
        }
        if rows.trained > self._rows_before:
            seconds = time.monotonic() - self._started
            numbers["seconds_left"] = seconds_left(
                planned=rows.planned,
                left=rows.left,
                spared=rows.planned - rows.trained - rows.left,
                savings=self._savings,
                rows_per_second=(rows.trained - self._rows_before) / max(seconds, 1e-9),
            )
        self._store.append_events(
            self._task_id, [EventDraft(kind="progress", text=f"{speed:.0f} tokens/s", numbers=numbers)]
        )

    def _count_rows(self) -> _Rows:
        jobs = self._store.jobs(self._task_id)
        planned = sum(record.total_steps * record.job.rows_per_update for record in jobs)
        trained = sum(record.step * record.job.rows_per_update for record in jobs)
        left = sum(
            (record.total_steps - record.step) * record.job.rows_per_update
            for record in jobs
            if not record.state.is_end
        )
        return _Rows(planned=planned, trained=trained, left=left)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Training rows of all jobs of a task."""

    planned: int
    trained: int
    left: int
    """That living jobs may still train."""
