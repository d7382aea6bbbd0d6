"""Which job came where, and how many training rows early exit saved. Pure functions of job rows and scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from alto_core.budget import num_samples
from alto_core.domain import EARLY_EXITS, JobState
from alto_core.outcomes import Interval
from alto_core.report.values import JobRow
from alto_core.result import TaskResult

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class LeaderboardRow:
    """One job's place."""

    place: int | None
    """1 is the winner; None for a job that has no finite validation loss."""
    row: JobRow
    is_winner: bool
    val_metric: Interval | None
    """The task's metric on validation rows, where it was measured."""
    loss_error: float | None = None
    """Half of the 95 % interval of the validation loss, where the job was evaluated."""
    winner_lead: Interval | None = None
    """The winner's loss, or the metric where that chose it, minus this job's, paired row by row."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values by column name, for tables and JSON."""
        row = self.row
        return {
            "place": self.place,
            "job_id": row.job_id,
            "winner": self.is_winner,
            "state": str(row.state),
            "learning_rate": row.job.learning_rate,
            "lora_rank": row.job.lora_rank,
            "rows_per_update": row.job.rows_per_update,
            "best_val_loss": row.best_val_loss,
            "best_step": row.best_step,
            "val_loss_error": self.loss_error,
            **_as_columns("val_metric", self.val_metric),
            **_as_columns("winner_lead", self.winner_lead),
            "gate_rank": row.gate_rank,
            "step": row.step,
            "total_steps": row.total_steps,
            "reason": row.reason,
        }


@dataclass(frozen=True, kw_only=True)
class SampleCount:
    """Training rows, counted with repetition over epochs."""

    planned: int
    """What all jobs would have taken without early exit."""
    trained: int
    trained_by_finished: int
    saved_by: Mapping[JobState, int]
    """Rows not trained, by the state that ended the job. Only early exits count, not failures."""

    @property
    def saved(self) -> int:
        return sum(self.saved_by.values())

    @property
    def saved_share(self) -> float:
        return self.saved / self.planned if self.planned else 0.0


def leaderboard(
    jobs: Sequence[JobRow], result: TaskResult, *, choose_by: Literal["val_loss", "metric"] = "val_loss"
) -> tuple[LeaderboardRow, ...]:
    """Order the jobs: the winner, finished ones, unended ones, ended ones, and last those without a finite loss.

    A job that ended early measured its best loss on a part of its budget, so it stands below every finished one.
    Within a group the lower validation loss comes first, or with `choose_by="metric"` the higher metric.
    """
    scores = {s.job_id: s for s in result.scores if s.split == "validation"}
    metrics = {job_id: score.metric_value for job_id, score in scores.items()}
    quantity = next((s.metric for s in scores.values() if s.metric), None) if choose_by == "metric" else "loss"
    leads = {c.other_id: c.difference for c in result.comparisons if c.split == "validation" and c.quantity == quantity}

    def key(row: JobRow) -> tuple[bool, bool, int, float, float, str]:
        metric = metrics.get(row.job_id)
        by_metric = -metric.value if metric is not None and choose_by == "metric" else 0.0
        loss = row.best_val_loss if row.best_val_loss is not None and _has_loss(row) else math.inf
        group = 0 if row.state is JobState.FINISHED else 2 if row.state.is_end else 1
        return (row.job_id != result.winner, not _has_loss(row), group, by_metric, loss, row.job_id)

    return tuple(
        LeaderboardRow(
            place=place if _has_loss(row) else None,
            row=row,
            is_winner=row.job_id == result.winner,
            val_metric=metrics.get(row.job_id),
            loss_error=scores[row.job_id].loss_error if row.job_id in scores else None,
            winner_lead=leads.get(row.job_id),
        )
        for place, row in enumerate(sorted(jobs, key=key), start=1)
    )


def leaderboard_table(
    jobs: Sequence[JobRow], result: TaskResult, *, choose_by: Literal["val_loss", "metric"] = "val_loss"
) -> pd.DataFrame:
    """The leaderboard as a data frame, one row per job, the winner first."""
    import pandas as pd

    return pd.DataFrame([line.as_dict() for line in leaderboard(jobs, result, choose_by=choose_by)])


def count_samples(jobs: Sequence[JobRow], *, num_train_rows: int | None = None) -> SampleCount:
    """Count the rows that jobs trained on and those that early exit spared them.

    Args:
        jobs: all jobs of a task.
        num_train_rows: rows of the training split. None counts the short last batch of an epoch as a whole one.
    """
    planned = trained = by_finished = 0
    saved_by = dict.fromkeys(EARLY_EXITS, 0)
    for row in jobs:
        done, whole = (_rows_of(row, steps, num_train_rows) for steps in (row.step, row.total_steps))
        planned += whole
        trained += done
        by_finished += done if row.state is JobState.FINISHED else 0
        if row.state in saved_by:
            saved_by[row.state] += whole - done
    return SampleCount(planned=planned, trained=trained, trained_by_finished=by_finished, saved_by=saved_by)


def _as_columns(name: str, interval: Interval | None) -> dict[str, float | None]:
    return {
        name: interval.value if interval else None,
        f"{name}_low": interval.low if interval else None,
        f"{name}_high": interval.high if interval else None,
    }


def _rows_of(row: JobRow, steps: int, num_train_rows: int | None) -> int:
    return steps * row.job.rows_per_update if num_train_rows is None else num_samples(row.job, steps, num_train_rows)


def _has_loss(row: JobRow) -> bool:
    return row.best_val_loss is not None and math.isfinite(row.best_val_loss)
