"""MLflow away, locked or restarted while a task logs and decides: nothing lost, nothing twice, the same curves."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from alto_core.domain import CurveSource, JobState, TaskState
from alto_core.errors import TrackingError
from alto_core.settings import Settings
from alto_core.tracking import Tracker, deliver_left_behind


def points(settings: Settings) -> Counter[tuple[str, str, int]]:
    """How often the database holds a run's point, by run, metric and step."""
    with closing(sqlite3.connect(settings.home / "mlflow.db")) as database:
        return Counter(database.execute("SELECT run_uuid, key, step FROM metrics").fetchall())


@pytest.fixture
def away(embedded: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The same workspace while its MLflow does not answer."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    return replace(embedded, mlflow_tracking_uri="http://127.0.0.1:9")


def test_what_is_sent_twice_is_there_once(embedded: Settings, open_runs: Any, make: SimpleNamespace) -> None:
    """A process that dies between a call to MLflow and the note of it leaves the call to be made again."""
    runs, ids = open_runs(2)
    for job_id in ids:
        runs.log_steps([replace(r, train_loss=float("nan")) if r.step == 7 else r for r in make.steps(job_id, 1, 40)])
        runs.set_job_state(job_id, JobState.FINISHED)
    runs.log_evaluations([make.evaluation(job_id, 40) for job_id in ids])
    assert runs.release() == ""
    before = points(embedded)
    (embedded.task_folder("demo-1") / "tracking" / "cursor").unlink()
    (left,) = deliver_left_behind(embedded)
    assert "were delivered" in left.text
    assert points(embedded) == before
    assert set(before.values()) == {1}
    assert len(before) == 2 * (2 * 40 + 4)
    client = Tracker(embedded)._connection.client
    assert {client.get_run(run_id).info.status for run_id in runs.job_run_ids.values()} == {"FINISHED"}


def test_a_resumed_job_doubles_no_point(
    embedded: Settings, tracker: Tracker, open_runs: Any, make: SimpleNamespace
) -> None:
    """Killed after step 37 with a checkpoint of step 30; half of it had reached MLflow."""
    runs, (job_id,) = open_runs(1)
    runs.log_steps(make.steps(job_id, 1, 32))
    runs.log_evaluations([make.evaluation(job_id, 32)])
    runs.flush()
    runs.log_steps(make.steps(job_id, 33, 37))
    runs._outbox._sender.stop()
    resumed = tracker.task_runs("demo-1")
    resumed.log_steps(make.steps(job_id, 31, 32))
    resumed.log_evaluations([make.evaluation(job_id, 32)])
    assert resumed.read_curves()[job_id].train_steps == tuple(range(1, 33))
    resumed.log_steps(make.steps(job_id, 33, 40))
    resumed.log_evaluations([make.evaluation(job_id, 40)])
    curve = resumed.read_curves()[job_id]
    assert resumed.release() == ""
    found = points(embedded)
    assert set(found.values()) == {1}
    assert len(found) == 2 * 40 + 2 * 4
    assert curve == Tracker(embedded).task_runs("demo-1").read_curves()[job_id]


def test_a_locked_database_is_waited_for_and_decided_without(
    embedded: Settings, open_runs: Any, make: SimpleNamespace
) -> None:
    runs, (job_id,) = open_runs(1)
    runs.log_steps(make.steps(job_id, 1, 10))
    runs.log_evaluations([make.evaluation(job_id, 10)])
    settled = runs.settled_curves([job_id])[job_id]
    assert runs.curve_source(job_id) is CurveSource.MLFLOW
    with closing(sqlite3.connect(embedded.home / "mlflow.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        runs.log_steps(make.steps(job_id, 11, 20))
        runs.log_evaluations([make.evaluation(job_id, 20)])
        start = time.monotonic()
        spooled = runs.settled_curves([job_id], 0.2)[job_id]
        assert time.monotonic() - start < 15
        assert runs.curve_source(job_id) is CurveSource.SPOOL
        other.execute("ROLLBACK")
    runs.flush()
    runs.settled_curves([job_id])
    assert runs.curve_source(job_id) is CurveSource.MLFLOW
    assert runs.read_curves()[job_id] == spooled
    assert spooled.through(10) == settled
    assert set(points(embedded).values()) == {1}


def test_a_task_goes_on_while_mlflow_does_not_answer(
    embedded: Settings, away: Settings, open_runs: Any, make: SimpleNamespace
) -> None:
    """One stage ends before the outage, two run in it, and the next process delivers."""
    runs, ids = open_runs(3)
    for job_id in ids:
        runs.log_steps(make.steps(job_id, 1, 10))
    runs.log_evaluations([make.evaluation(job_id, 10) for job_id in ids])
    runs.set_job_state(ids[2], JobState.DIVERGING, reason="rises")
    before = runs.read_curves()
    assert runs.release() == ""

    gate = Tracker(away).task_runs("demo-1")
    assert gate.settled_curves(ids) == before
    assert {gate.curve_source(job_id) for job_id in ids} == {CurveSource.SPOOL}
    gate.set_job_state(ids[1], JobState.UNDERPERFORMING, reason="ranked last", gate_rank=2)
    gate.log_text("[]", "decisions.json")
    assert "alto reconcile" in gate.release(0.1)

    going_on = Tracker(away).task_runs("demo-1")
    going_on.log_steps(make.steps(ids[0], 11, 20))
    going_on.log_evaluations([make.evaluation(ids[0], 20)])
    curves = going_on.read_curves()
    assert [curves[job_id].ended for job_id in ids] == [None, JobState.UNDERPERFORMING, JobState.DIVERGING]
    assert sorted(curves[ids[0]].row_losses) == [10, 20]
    assert "alto reconcile" in going_on.release(0.1)

    last = Tracker(embedded).task_runs("demo-1")  # MLflow is back; what it lacks is in the spool
    assert last.read_curves() == curves
    last.close(TaskState.CANCELLED, "cancelled")
    assert last.release() == ""
    found = points(embedded)
    assert set(found.values()) == {1}
    assert len(found) == 3 * (2 * 10 + 4) + 2 * 10 + 4
    client = Tracker(embedded)._connection.client
    assert [client.get_run(r).data.tags["alto.state"] for r in runs.job_run_ids.values()] == [
        "cancelled",
        "underperforming",
        "diverging",
    ]
    assert "decisions.json" in {item.path for item in client.list_artifacts(runs.parent_run_id)}


def test_a_task_that_is_not_known_cannot_be_opened_while_mlflow_is_away(
    away: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alto_core.tracking.connection.PATIENCE_SECONDS", 0.2)
    with pytest.raises(TrackingError, match="gave no answer"):
        Tracker(away).task_runs("demo-1")
