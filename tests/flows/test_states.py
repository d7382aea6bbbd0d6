"""A task whose process is killed: the next look sets it right in the store, in MLflow and in Prefect."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.settings import PREFECT_API_URL

from alto_core.cluster.dead_tasks import DIED
from alto_core.config import TuningTask
from alto_core.domain import JobState, TaskState
from alto_core.settings import load_settings
from alto_core.store import Store
from alto_core.tracking import Tracker
from flows.reconcile import sweep

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.slow]

TUNE = """
import json, sys
from flows.api import parse_task, tune

tune(parse_task(json.loads(sys.argv[1])))
"""
NUM_STAGES = 6


@pytest.fixture
def dead_task(tiny_task: Callable[..., TuningTask], workspace_home: Path) -> str:
    """A task whose process was killed while it trained."""
    task = tiny_task(budget={"steps": 100_000, "eval_interval_fraction": 0.0001, "gate_warmup_fraction": 0.5})
    environment = {**os.environ, "PREFECT_API_URL": str(PREFECT_API_URL.value())}
    process = subprocess.Popen([sys.executable, "-c", TUNE, task.model_dump_json()], env=environment)
    store = Store(load_settings())
    try:
        while not any(record.step for one in store.tasks() for record in store.jobs(one.task_id)):
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.2)
    finally:
        process.kill()
        process.wait()
    (record,) = store.tasks()
    return record.task_id


def test_a_killed_task_is_failed_everywhere_and_its_flow_run_crashed(dead_task: str) -> None:
    settings = load_settings()
    store, client = Store(settings), MlflowClient(settings.mlflow_tracking_uri)
    runs = Tracker(settings).task_runs(dead_task)
    run_id = UUID(store.task(dead_task).flow_run_id or "")
    assert store.task(dead_task).state is TaskState.RUNNING
    assert client.get_run(runs.parent_run_id).info.status == "RUNNING"

    (finding,) = sweep()
    assert (finding.task_id, DIED in finding.text) == (dead_task, True)
    assert (store.task(dead_task).state, store.task(dead_task).message) == (TaskState.FAILED, DIED)
    assert {record.state for record in store.jobs(dead_task)} <= {JobState.CANCELLED, JobState.DIVERGING}
    assert client.get_run(runs.parent_run_id).info.status == "FAILED"
    assert {client.get_run(one).info.status for one in runs.job_run_ids.values()} == {"KILLED"}
    with get_client(sync_client=True) as prefect:
        state = prefect.read_flow_run(run_id).state
        stages = prefect.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])))
    assert state is not None and state.is_crashed() and DIED in (state.message or "")
    assert stages and all(stage.state is not None and stage.state.is_final() for stage in stages)
    assert len(stages) <= NUM_STAGES, "Prefect hears of stages, not of jobs or steps: its database stays small"
    assert sweep() == ()
