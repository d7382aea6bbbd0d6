"""A task trained while MLflow does not answer decides what it decides otherwise, and nothing of it is lost."""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from alto_core.config import TuningTask
from alto_core.decision_log import DecisionLog
from alto_core.domain import CurveSource
from alto_core.preparation import create_task, plan_task
from alto_core.settings import load_settings
from alto_core.store import Store
from alto_core.tracking import Tracker, deliver_left_behind
from alto_core.training import decide_gate, train_until
from alto_core.workspace import Workspace


def trained(task: TuningTask, mlflow_uri: str | None) -> Workspace:
    """The task through warmup, gate and the survivors' training, MLflow being at another address after its creation."""
    settings = load_settings()
    task_id = Store(settings).new_task_id(task.name)
    create_task(plan_task(task), task_id, settings)
    with pytest.MonkeyPatch.context() as patch:
        if mlflow_uri is not None:
            patch.setenv("MLFLOW_TRACKING_URI", mlflow_uri)
        workspace = Workspace.open(task_id)
        fraction = task.budget.gate_warmup_fraction
        train_until(workspace, fraction, num_slots=4)
        decide_gate(workspace, fraction)
        train_until(workspace, 1.0, num_slots=4)
    return workspace


@pytest.mark.slow
@pytest.mark.usefixtures("workspace_home")
def test_a_task_trains_and_decides_the_same_while_mlflow_is_away(
    tiny_task: Callable[..., TuningTask], empty_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings()
    shutil.copy(empty_database, settings.home / "mlflow.db")
    task = tiny_task(early_exit={"preset": "paper"})
    calm = trained(task, None)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr("alto_core.tracking.connection.PATIENCE_SECONDS", 0.5)
    stormy = trained(task, "http://127.0.0.1:9")

    warnings = [event.text for event in stormy.store.events(stormy.task_id) if event.kind == "warning"]
    assert warnings
    assert all("alto reconcile" in text for text in warnings)
    assert [left.task_id for left in deliver_left_behind(settings)] == [stormy.task_id]
    tracker = Tracker(settings)
    curves, expected = (tracker.task_runs(w.task_id).read_curves() for w in (stormy, calm))
    assert repr(curves) == repr(expected)  # to the last digit; a loss that is no number equals itself here
    made, wanted = (DecisionLog(w.folder).read() for w in (stormy, calm))
    assert {entry.curve for entry in wanted} <= {CurveSource.MLFLOW, None}
    assert {entry.curve for entry in made} <= {CurveSource.SPOOL, None}
    assert [(type(m), getattr(m, "job_id", ""), m.fraction) for m in made] == [
        (type(w), getattr(w, "job_id", ""), w.fraction) for w in wanted
    ]
    with closing(sqlite3.connect(settings.home / "mlflow.db")) as database:
        rows = database.execute("SELECT run_uuid, key, step FROM metrics WHERE key NOT LIKE 'system/%'").fetchall()
    assert set(Counter(rows).values()) == {1}
