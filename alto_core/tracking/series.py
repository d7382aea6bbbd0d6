"""The curves of one task's jobs: what MLflow gave back, and behind it the points that are still on their way there.

A point on its way is the same number that MLflow will hold, so a curve has the same points however far
MLflow is behind.
A step that was logged again (after a resume) counts once, with its newest value. Points beyond the last step that this
process logged for a job are left over from before a resume and stay hidden, so that a verdict sees what an unbroken run
would have seen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from alto_core.domain import RowLosses
from alto_core.early_exit.curves import Curve
from alto_core.tracking.description import TrackedJob
from alto_core.tracking.history import Point, SeriesRequest
from alto_core.tracking.messages import TRAIN_LOSS, VAL_LOSS, Message, Steps, Values


@dataclass
class Series:
    """Points of one metric of one job by step: (timestamp, value)."""

    points: dict[int, tuple[int, float]] = field(default_factory=dict)
    last_read: int = 0
    """The last step that MLflow gave back."""

    def add(self, step: int, timestamp: int, value: float) -> None:
        """Take a point in, unless a newer one of its step is there."""
        if timestamp >= self.points.get(step, (0, 0.0))[0]:
            self.points[step] = (timestamp, value)

    def add_spooled(self, step: int, timestamp: int, value: float) -> None:
        """Take in a point that MLflow did not give back, unless it did."""
        if timestamp > self.points.get(step, (0, 0.0))[0]:
            self.points[step] = (timestamp, value)
            self.last_read = min(self.last_read, step - 1)

    def through(self, last: int | None) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Rising steps up to `last` (None: all) and their values."""
        steps = tuple(sorted(s for s in self.points if last is None or s <= last))
        return steps, tuple(self.points[s][1] for s in steps)


class CurveCache:
    """Curves of the jobs of one task. Not safe for several threads."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], Series] = {}
        self._last_logged: dict[str, int] = {}

    def note_step(self, run_id: str, step: int) -> None:
        """Say that this process logs an optimizer step."""
        self._last_logged[run_id] = step

    def note_evaluation(self, run_id: str, step: int) -> None:
        """Say that this process logs an evaluation."""
        self._last_logged[run_id] = max(step, self._last_logged.get(run_id, 0))

    def requests(self, run_ids: Collection[str]) -> list[SeriesRequest]:
        """What MLflow has not given back yet."""
        return [
            SeriesRequest(run_id=run_id, key=key, after_step=self._of(run_id, key).last_read)
            for run_id in run_ids
            for key in (TRAIN_LOSS, VAL_LOSS)
        ]

    def add_read(self, points: Sequence[Point]) -> None:
        """Take in what MLflow gave back."""
        for point in points:
            series = self._of(point.run_id, point.key)
            series.add(point.step, point.timestamp, point.value)
            series.last_read = max(series.last_read, point.step)

    def add_spooled(self, message: Message) -> None:
        """Take in what is on its way to MLflow."""
        if isinstance(message, Steps):
            series = self._of(message.run_id, TRAIN_LOSS)
            for step, loss in enumerate(message.train_losses, message.first_step):
                series.add_spooled(step, message.timestamp, loss)
        elif isinstance(message, Values) and VAL_LOSS in message.values:
            series = self._of(message.run_id, VAL_LOSS)
            series.add_spooled(message.step, message.timestamp, message.values[VAL_LOSS])

    def is_read(self, run_id: str) -> bool:
        """Whether MLflow gave back every point of a run's curves."""
        return all(
            max(self._of(run_id, key).points, default=0) <= self._of(run_id, key).last_read
            for key in (TRAIN_LOSS, VAL_LOSS)
        )

    def curve(self, job: TrackedJob, row_losses: Mapping[int, RowLosses]) -> Curve:
        """A job's curve as it stands."""
        last = self._last_logged.get(job.run_id)
        train_steps, train_losses = self._of(job.run_id, TRAIN_LOSS).through(last)
        val_steps, val_losses = self._of(job.run_id, VAL_LOSS).through(last)
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

    def _of(self, run_id: str, key: str) -> Series:
        return self._series.setdefault((run_id, key), Series())
