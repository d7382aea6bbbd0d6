"""The curves of one task's jobs as MLflow holds them, kept up to date by reading only what is new.

A step that was logged again (after a resume) counts once, with its newest value. Points beyond the last step that this
process logged for a job are left over from before a resume and stay hidden, so that a verdict sees what an unbroken run
would have seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from alto_core.domain import RowLosses
from alto_core.early_exit.curves import Curve
from alto_core.tracking.description import JobRun
from alto_core.tracking.history import HistoryReader, SeriesRequest

TRAIN_LOSS = "train_loss"
VAL_LOSS = "val_loss"


@dataclass
class Series:
    """Points of one metric of one job by step: (timestamp, value)."""

    points: dict[int, tuple[int, float]] = field(default_factory=dict)
    last_read: int = 0

    def add(self, step: int, timestamp: int, value: float) -> None:
        """Take a point in, unless a newer one of its step is there."""
        self.last_read = max(self.last_read, step)
        if timestamp >= self.points.get(step, (0, 0.0))[0]:
            self.points[step] = (timestamp, value)

    def forget_from(self, step: int) -> None:
        """Drop this step and all after it, so that they are read again."""
        if self.last_read >= step:
            self.points = {s: point for s, point in self.points.items() if s < step}
            self.last_read = step - 1

    def through(self, last: int | None) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Rising steps up to `last` (None: all) and their values."""
        steps = tuple(sorted(s for s in self.points if last is None or s <= last))
        return steps, tuple(self.points[s][1] for s in steps)


class CurveCache:
    """Curves of the jobs of one task."""

    def __init__(self, reader: HistoryReader):
        self._reader = reader
        self._series: dict[tuple[str, str], Series] = {}
        self._last_logged: dict[str, int] = {}

    def note_step(self, job_id: str, step: int) -> None:
        """Say that this process logs an optimizer step."""
        self._last_logged[job_id] = step
        self._forget(job_id, TRAIN_LOSS, step)

    def note_evaluation(self, job_id: str, step: int) -> None:
        """Say that this process logs an evaluation."""
        self._last_logged[job_id] = max(step, self._last_logged.get(job_id, 0))
        self._forget(job_id, VAL_LOSS, step)

    def read(self, jobs: Sequence[JobRun], row_losses: Mapping[str, Mapping[int, RowLosses]]) -> dict[str, Curve]:
        """The curves as they stand in MLflow now.

        Raises:
            TrackingError: MLflow cannot be reached.
        """
        self._fetch(jobs)
        return {job.job_id: self._curve(job, row_losses.get(job.job_id, {})) for job in jobs}

    def _forget(self, job_id: str, key: str, step: int) -> None:
        """What was read of a step that is logged again must be read again."""
        if (job_id, key) in self._series:
            self._series[job_id, key].forget_from(step)

    def _fetch(self, jobs: Sequence[JobRun]) -> None:
        job_of_run = {job.run_id: job.job_id for job in jobs}
        requests = [
            SeriesRequest(
                run_id=job.run_id, key=key, after_step=self._series.setdefault((job.job_id, key), Series()).last_read
            )
            for job in jobs
            for key in (TRAIN_LOSS, VAL_LOSS)
        ]
        for point in self._reader.read(requests):
            self._series[job_of_run[point.run_id], point.key].add(point.step, point.timestamp, point.value)

    def _curve(self, job: JobRun, row_losses: Mapping[int, RowLosses]) -> Curve:
        last = self._last_logged.get(job.job_id)
        train_steps, train_losses = self._series[job.job_id, TRAIN_LOSS].through(last)
        val_steps, val_losses = self._series[job.job_id, VAL_LOSS].through(last)
        return Curve(
            job_id=job.job_id,
            learning_rate=job.learning_rate,
            total_steps=job.total_steps,
            warmup_steps=job.warmup_steps,
            train_steps=train_steps,
            train_losses=train_losses,
            val_steps=val_steps,
            val_losses=val_losses,
            row_losses={step: row_losses[step] for step in val_steps if step in row_losses},
            ended=job.state if job.state.is_end else None,
        )
