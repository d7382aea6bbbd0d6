"""Where jobs and tasks are. The same words stand in the command line, in MLflow and in Prefect."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """Where a job is. The last six are end states."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    DIVERGING = "diverging"
    OVERFITTING = "overfitting"
    UNDERPERFORMING = "underperforming"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        return self not in (JobState.WAITING, JobState.RUNNING)

    def may_win(self, *, was_ranked: bool) -> bool:
        """Whether the best adapter of a job that ended so is a result of the task.

        Args:
            was_ranked: at the warmup gate. What diverged after it has an adapter from before, as good as its loss says;
                what diverged earlier was hardly trained.
        """
        return self in (JobState.FINISHED, JobState.OVERFITTING) or (self is JobState.DIVERGING and was_ranked)


EARLY_EXITS = (JobState.UNDERPERFORMING, JobState.OVERFITTING, JobState.DIVERGING)
"""Ends that a policy decides before the budget is spent, and that a person may think better of."""


class TaskState(StrEnum):
    """Where a tuning task is."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        return self not in (TaskState.QUEUED, TaskState.RUNNING)


class CurveSource(StrEnum):
    """Where the curve of a job was read that a decision was taken on; the numbers are the same."""

    MLFLOW = "mlflow"
    SPOOL = "spool"
    """MLflow did not have all of it yet."""


class Stage(StrEnum):
    """The six stages of a tuning task, in order."""

    PROFILE = "profile"
    WARMUP = "warmup"
    GATE = "gate"
    CONTINUE = "continue"
    EVALUATE = "evaluate"
    REGISTER = "register"
