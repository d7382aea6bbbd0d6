"""Places, and rows saved, against counts made by hand."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from alto_core.domain import JobState, LoraJob
from alto_core.outcomes import Interval, Score
from alto_core.report import JobRow, ReportData, count_samples, leaderboard, leaderboard_table
from alto_core.result import TaskResult


def _row(rate: float, state: JobState, loss: float | None, step: int = 10, batch: int = 4) -> JobRow:
    job = LoraJob(learning_rate=rate, lora_rank=4, lora_alpha=8, adapter_batch_size=batch, target_modules=("q",))
    return JobRow(job=job, state=state, total_steps=10, warmup_steps=1, step=step, best_val_loss=loss, best_step=step)


def test_an_ended_job_stands_below_every_finished_one_however_low_its_loss() -> None:
    rows = [
        _row(1, JobState.OVERFITTING, 0.1),
        _row(2, JobState.FINISHED, 0.5),
        _row(3, JobState.DIVERGING, math.nan),
        _row(4, JobState.FINISHED, 0.4),
        _row(5, JobState.WAITING, None),
        _row(6, JobState.UNDERPERFORMING, 0.3),
    ]
    board = leaderboard(rows, TaskResult(winner=rows[1].job_id))
    assert [line.row.job.learning_rate for line in board][:4] == [2, 4, 1, 6]
    assert [line.place for line in board] == [1, 2, 3, 4, None, None]
    assert [line.is_winner for line in board] == [True] + [False] * 5


def test_choosing_by_metric_orders_by_metric() -> None:
    rows = [_row(1, JobState.FINISHED, 0.1), _row(2, JobState.FINISHED, 0.2), _row(3, JobState.FINISHED, 0.3)]
    scores = tuple(
        Score(
            job_id=row.job_id,
            split="validation",
            loss=0.0,
            loss_standard_error=0.0,
            metric="exact_match",
            metric_value=Interval(value=share, low=0, high=1, num_rows=9),
        )
        for row, share in zip(rows, (0.2, 0.9, 0.5), strict=True)
    )
    result = TaskResult(scores=scores)
    assert [x.row.job.learning_rate for x in leaderboard(rows, result, choose_by="metric")] == [2, 3, 1]
    assert [x.row.job.learning_rate for x in leaderboard(rows, result)] == [1, 2, 3]


def test_the_order_does_not_depend_on_the_order_of_the_jobs(report_data: ReportData) -> None:
    forward = leaderboard(report_data.jobs, report_data.result)
    assert leaderboard(report_data.jobs[::-1], report_data.result) == forward


def test_rows_saved_count_early_exits_only() -> None:
    rows = [
        _row(1, JobState.FINISHED, 0.1),
        _row(2, JobState.UNDERPERFORMING, 0.2, step=1),
        _row(3, JobState.DIVERGING, None, step=3, batch=2),
        _row(4, JobState.FAILED, 0.2, step=5),
        _row(5, JobState.CANCELLED, 0.2, step=5),
    ]
    count = count_samples(rows)
    assert count.planned == 40 + 40 + 20 + 40 + 40
    assert count.trained == 40 + 4 + 6 + 20 + 20
    assert count.saved_by[JobState.UNDERPERFORMING] == 36
    assert count.saved_by[JobState.DIVERGING] == 14
    assert count.saved == 50
    assert count.trained_by_finished == 40
    assert count.saved_share == pytest.approx(50 / 180)


def test_the_short_last_batch_of_an_epoch_is_counted_as_it_is() -> None:
    # 18 rows at 4 a step: 5 steps an epoch, the fifth with 2 rows; 10 steps are 2 epochs
    count = count_samples([_row(1, JobState.UNDERPERFORMING, 0.1, step=5)], num_train_rows=18)
    assert (count.planned, count.trained, count.saved) == (36, 18, 18)


def test_no_jobs_save_nothing() -> None:
    assert count_samples([]).saved_share == 0


def test_the_table_has_a_row_per_job_and_the_winner_first(report_data: ReportData) -> None:
    table = leaderboard_table(report_data.jobs, report_data.result)
    assert len(table) == len(report_data.jobs)
    assert table["job_id"].iloc[0] == report_data.result.winner
    assert table["val_metric"].iloc[0] == 0.9


def test_a_result_survives_json(report_data: ReportData) -> None:
    result = dataclasses.replace(report_data.result, data_report={"rows_read": {"train": 3}})
    assert TaskResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    assert TaskResult.from_dict({}) == TaskResult()
