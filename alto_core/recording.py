"""Trainings that log to no MLflow run: curves in memory, put together from what the executor measures."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence

from alto_core.domain import Boundary, JobBudget, LoraJob, RowLosses
from alto_core.early_exit import NonePolicy
from alto_core.early_exit.curves import Curve
from alto_core.executor import Executor
from alto_core.job_run import JobRun


class CurveRecorder:
    """Grows the curves of some jobs boundary by boundary.

    Args:
        jobs: what is recorded.
        budgets: by job id.
        begun: curves up to where the recording takes over; a step that is measured again takes the place of the old.
    """

    def __init__(
        self, jobs: Iterable[LoraJob], budgets: Mapping[str, JobBudget], begun: Mapping[str, Curve] | None = None
    ):
        self._jobs = {job.job_id: job for job in jobs}
        self._budgets = budgets
        self._train: dict[str, dict[int, float]] = {job_id: {} for job_id in self._jobs}
        self._val: dict[str, dict[int, float]] = {job_id: {} for job_id in self._jobs}
        self._rows: dict[str, dict[int, RowLosses]] = {job_id: {} for job_id in self._jobs}
        for job_id, curve in (begun or {}).items():
            self._train[job_id].update(zip(curve.train_steps, curve.train_losses, strict=True))
            self._val[job_id].update(zip(curve.val_steps, curve.val_losses, strict=True))
            self._rows[job_id].update(curve.row_losses)
        self.step_seconds = 0.0
        """Wall time of joint steps so far."""
        self.evaluation_seconds = 0.0
        """Wall time of evaluations so far."""

    def add(self, boundary: Boundary) -> None:
        """Take in what was measured."""
        for record in boundary.steps:
            self._train[record.job_id][record.step] = record.train_loss
        for evaluation in boundary.evaluations:
            self._val[evaluation.job_id][evaluation.step] = evaluation.val_loss
            self._rows[evaluation.job_id][evaluation.step] = evaluation.row_losses
        self.step_seconds += boundary.step_seconds
        self.evaluation_seconds += boundary.evaluation_seconds

    def curve(self, job_id: str) -> Curve:
        """The curve of one job so far, without an end state."""
        train, val = sorted(self._train[job_id].items()), sorted(self._val[job_id].items())
        budget = self._budgets[job_id]
        return Curve(
            job_id=job_id,
            learning_rate=self._jobs[job_id].learning_rate,
            total_steps=budget.total_steps,
            warmup_steps=budget.warmup_steps,
            train_steps=tuple(step for step, _ in train),
            train_losses=tuple(loss for _, loss in train),
            val_steps=tuple(step for step, _ in val),
            val_losses=tuple(loss for _, loss in val),
            row_losses=dict(self._rows[job_id]),
        )


def record_training(
    executor: Executor, stretches: Sequence[JobRun], recorder: CurveRecorder, *, deadline: float = math.inf
) -> None:
    """Train stretches to their ends without early exit: only a loss that is no number ends a job.

    Args:
        deadline: second of `time.monotonic` after which no further step is made.

    Raises:
        TimeoutError: the deadline has passed.
    """
    session, policy = executor.run(stretches), NonePolicy()
    boundary = next(session, None)
    while boundary is not None:
        recorder.add(boundary)
        if time.monotonic() > deadline:
            raise TimeoutError("the time is over before the training is")
        judged = (policy.judge(recorder.curve(job_id)) for job_id in boundary.running)
        try:
            boundary = session.send([verdict for verdict in judged if verdict])
        except StopIteration:
            return
