"""Curves read back from MLflow equal what was logged."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from alto_core.domain import CurveSource, JobState
from alto_core.early_exit.curves import paired_difference, smoothed
from alto_core.errors import TrackingError
from alto_core.tracking import Tracker


def test_curves_come_back_as_logged(open_runs: Any, make: SimpleNamespace) -> None:
    runs, ids = open_runs(3)
    steps = {job_id: make.steps(job_id, 1, 20, offset=i) for i, job_id in enumerate(ids)}
    evaluations = [make.evaluation(job_id, step, (1.0 / 3, 2.2, step / 7)) for job_id in ids for step in (10, 20)]
    for of_job in steps.values():
        runs.log_steps(of_job)
    runs.log_evaluations([e for e in evaluations if e.step == 10])
    runs.log_evaluations([e for e in evaluations if e.step == 20])
    runs.flush()
    curves = runs.read_curves(ids)
    assert list(curves) == ids
    for i, job_id in enumerate(ids):
        curve = curves[job_id]
        mine = [e for e in evaluations if e.job_id == job_id]
        assert curve.train_steps == tuple(range(1, 21))
        assert curve.train_losses == tuple(r.train_loss for r in steps[job_id])
        assert curve.val_steps == (10, 20)
        assert curve.val_losses == tuple(e.val_loss for e in mine)
        assert curve.row_losses == {e.step: e.row_losses for e in mine}
        assert (curve.total_steps, curve.warmup_steps) == (400, 40)
        assert curve.learning_rate == pytest.approx(1e-4 * (i + 1), rel=0)
        assert curve.ended is None


def test_values_that_are_no_numbers_come_back_as_they_were(open_runs: Any, make: SimpleNamespace) -> None:
    runs, (job_id,) = open_runs(1)
    losses = [2.0, math.nan, math.inf, -math.inf, 1e39, 1.0]
    runs.log_steps([replace(r, train_loss=x) for r, x in zip(make.steps(job_id, 1, 6), losses, strict=True)])
    runs.log_evaluations([make.evaluation(job_id, 6, (math.nan, 1.0))])
    runs.flush()
    curve = runs.read_curves()[job_id]
    assert curve.train_losses == pytest.approx(losses, nan_ok=True, rel=0)
    assert math.isnan(curve.val_losses[0])
    assert math.isnan(curve.row_losses[6].loss_sums[0])
    assert curve.row_losses[6].loss_sums[1] == 1.0


def test_only_new_points_are_read_after_the_first_call(open_runs: Any, make: SimpleNamespace, monkeypatch: Any) -> None:
    runs, (job_id,) = open_runs(1)
    runs.log_steps(make.steps(job_id, 1, 30))
    runs.flush()
    runs.read_curves()
    reader, seen = runs._curves._reader, []
    read = reader.read
    monkeypatch.setattr(reader, "read", lambda requests: seen.append(read(requests)) or seen[-1])
    runs.log_steps(make.steps(job_id, 31, 34))
    assert runs.settled_curves([job_id])[job_id].train_steps == tuple(range(1, 35))
    assert runs.curve_source(job_id) is CurveSource.MLFLOW
    assert sorted(point.step for points in seen for point in points) == [31, 32, 33, 34]


def test_a_step_logged_again_counts_once_with_its_newest_value(
    tracker: Tracker, open_runs: Any, make: SimpleNamespace
) -> None:
    runs, (job_id,) = open_runs(1)
    runs.log_steps(make.steps(job_id, 1, 37))
    runs.log_evaluations([make.evaluation(job_id, 32), make.evaluation(job_id, 36)])
    runs.flush()
    resumed = tracker.task_runs("demo-1")  # the process died; its checkpoint is of step 30
    assert resumed.read_curves()[job_id].train_steps == tuple(range(1, 38))
    resumed.log_steps(make.steps(job_id, 31, 33, offset=5.0))
    resumed.log_evaluations([make.evaluation(job_id, 32, (9.0, 9.0))])
    resumed.flush()
    for reader in (resumed, tracker.task_runs("demo-1")):
        curve = reader.read_curves()[job_id]
        assert curve.train_losses[29:33] == (2.0 / 30, 5 + 2.0 / 31, 5 + 2.0 / 32, 5 + 2.0 / 33)
        assert curve.val_losses[0] == 6.0
        assert curve.row_losses[32].loss_sums == (9.0, 9.0)
    # what the dead process logged beyond step 33 must not reach a verdict of this one
    assert resumed.read_curves()[job_id].last_step == 33
    assert resumed.read_curves()[job_id].val_steps == (32,)


def history(tracker: Tracker, runs: Any, job_id: str, key: str) -> list[tuple[int, float]]:
    """What MLflow holds of a metric, every point of it."""
    points = tracker._connection.client.get_metric_history(runs.job_run_ids[job_id], key)
    return sorted((point.step, point.value) for point in points)


def test_running_sums_go_on_after_a_resume(tracker: Tracker, open_runs: Any, make: SimpleNamespace) -> None:
    runs, ids = open_runs(2)
    records = make.steps(ids[0], 1, 12)
    runs.log_steps(records[:5] + make.steps(ids[1], 1, 5))
    runs.log_evaluations([make.evaluation(ids[0], 5)])
    runs.flush()
    resumed = tracker.task_runs("demo-1")
    resumed.log_steps(records[5:8] + make.steps(ids[1], 6, 6))
    resumed.log_evaluations([make.evaluation(ids[0], 8)])
    resumed.log_steps(records[3:])  # back to step 4 in the same process
    resumed.log_evaluations([make.evaluation(ids[0], 12)])
    resumed.flush()
    ema = smoothed([r.train_loss for r in records], 0.1)
    assert history(tracker, runs, ids[0], "train_loss_ema") == [(step, ema[step - 1]) for step in (5, 8, 12)]
    assert history(tracker, runs, ids[0], "tokens") == [(5, 500.0), (8, 800.0), (12, 1200.0)]
    assert history(tracker, runs, ids[0], "learning_rate") == [(5, 1e-3), (8, 1e-3), (12, 1e-3)]


def test_running_sums_go_on_without_a_spool(tracker: Tracker, open_runs: Any, make: SimpleNamespace) -> None:
    """A task of an older version, or one whose folder was lost."""
    runs, (job_id,) = open_runs(1)
    records = make.steps(job_id, 1, 12)
    runs.log_steps(records[:8])
    runs.log_evaluations([make.evaluation(job_id, 8)])
    runs.release()
    shutil.rmtree(tracker._settings.task_folder("demo-1"))
    resumed = tracker.task_runs("demo-1")
    resumed.log_steps(records[8:])
    resumed.log_evaluations([make.evaluation(job_id, 12)])
    resumed.flush()
    ema = smoothed([r.train_loss for r in records], 0.1)
    assert history(tracker, runs, job_id, "train_loss_ema") == [(step, ema[step - 1]) for step in (8, 12)]
    assert history(tracker, runs, job_id, "tokens") == [(8, 800.0), (12, 1200.0)]


def test_paired_differences_can_be_taken_from_what_was_read(open_runs: Any, make: SimpleNamespace) -> None:
    runs, (a, b) = open_runs(2)
    runs.log_evaluations([make.evaluation(a, 4, (1.0, 2.0, 3.0)), make.evaluation(b, 4, (1.5, 2.0, 3.5))])
    runs.flush()
    curves = runs.read_curves()
    difference, error = paired_difference(curves[b].row_losses[4], curves[a].row_losses[4])
    assert difference == pytest.approx(1 / 6)
    assert 0 < error < 1


def test_an_ended_job_says_so_in_its_curve(tracker: Tracker, open_runs: Any, make: SimpleNamespace) -> None:
    runs, ids = open_runs(2)
    runs.log_steps(make.steps(ids[0], 1, 3))
    runs.set_job_state(ids[0], JobState.DIVERGING, reason="rises")
    runs.flush()
    for reader in (runs, tracker.task_runs("demo-1")):
        curves = reader.read_curves()
        assert curves[ids[0]].ended is JobState.DIVERGING
        assert curves[ids[1]].ended is None
        assert curves[ids[1]].train_steps == ()


def test_an_unknown_job_is_refused(open_runs: Any, make: SimpleNamespace) -> None:
    runs, _ = open_runs(1)
    with pytest.raises(TrackingError, match="unknown id"):
        runs.read_curves(["nope"])
    with pytest.raises(TrackingError, match="unknown id"):
        runs.log_steps(make.steps("nope", 1, 1))


@pytest.mark.slow
def test_sixty_four_jobs_lose_no_step(open_runs: Any, make: SimpleNamespace) -> None:
    runs, ids = open_runs(64)
    for first in range(1, 201, 50):
        for job_id in ids:
            runs.log_steps(make.steps(job_id, first, first + 49))
    runs.flush()
    curves = runs.read_curves()
    assert all(curve.train_steps == tuple(range(1, 201)) for curve in curves.values())
    assert runs.seconds_in_background > 0
