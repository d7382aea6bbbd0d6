"""A person cancels one job of a task: the others do not notice, and a resumed run leaves it ended."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from alto_core.cancelling import CancelRequests, ask_to_cancel_job
from alto_core.config import TuningTask
from alto_core.decision_log import DecisionLog
from alto_core.domain import JobState, TaskState
from alto_core.errors import OwnerError
from alto_core.ownership import Person
from alto_core.preparation import create_task, plan_task
from alto_core.resuming import take_up
from alto_core.settings import load_settings
from alto_core.store import EventDraft, Store
from alto_core.task_lock import held
from alto_core.tracking import Tracker
from alto_core.training import train_until
from alto_core.workspace import Workspace
from flows.cli.app import app

SPACE = {"learning_rate": [1e-3, 2e-3, 3e-3], "lora_rank": 4, "adapter_batch_size": 4}
BUDGET = {"steps": 8, "eval_interval_fraction": 0.25}


@pytest.fixture
def begin(tiny_task: Callable[..., TuningTask], workspace_home: Path, empty_database: Path) -> Callable[[], Workspace]:
    """Makes a task of three jobs, ready to train."""
    shutil.copy(empty_database, workspace_home / "mlflow.db")
    task = tiny_task(search_space=SPACE, budget=BUDGET, early_exit={"preset": "none"})

    def make() -> Workspace:
        settings = load_settings()
        task_id = Store(settings).new_task_id(task.name)
        create_task(plan_task(task), task_id, settings)
        return Workspace.open(task_id)

    return make


def cancel(task_id: str, job_id: str) -> None:
    done = CliRunner().invoke(app, ["cancel", task_id, job_id])
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"{job_id}: ends at the next evaluation of {task_id}; the other jobs go on\n"


@pytest.mark.slow
def test_a_running_and_a_waiting_job_end_alone(begin: Callable[[], Workspace]) -> None:
    """P4: two slots, three jobs; the first is cancelled in its slot, the last before it has one."""
    calm, workspace = begin(), begin()
    train_until(calm, 1.0, num_slots=2)
    first, second, last = workspace.jobs
    cancel(workspace.task_id, first)
    cancel(workspace.task_id, last)
    train_until(workspace, 1.0, num_slots=2)

    records = workspace.records()
    assert {job_id: (record.state, record.step) for job_id, record in records.items()} == {
        first: (JobState.CANCELLED, 1),
        second: (JobState.FINISHED, 8),
        last: (JobState.CANCELLED, 0),
    }
    assert records[first].reason == "cancelled by a person"
    tracker = Tracker(load_settings())
    curves, expected = (tracker.task_runs(w.task_id).read_curves([second])[second] for w in (workspace, calm))
    assert repr(curves) == repr(expected), "to the last digit"
    assert workspace.checkpoint_step(first) == 1, "its checkpoint stays"
    client, run_ids = (
        MlflowClient(load_settings().mlflow_tracking_uri),
        tracker.task_runs(workspace.task_id).job_run_ids,
    )
    assert [client.get_run(run_ids[job_id]).info.status for job_id in (first, second, last)] == [
        "KILLED",
        "FINISHED",
        "KILLED",
    ]
    refused = CliRunner().invoke(app, ["cancel", workspace.task_id, second])
    assert (refused.exit_code, "got a finished job to cancel" in refused.stderr) == (7, True)


@pytest.mark.slow
def test_it_stays_cancelled_when_its_task_goes_on(begin: Callable[[], Workspace]) -> None:
    workspace = begin()
    first, second, last = workspace.jobs
    cancel(workspace.task_id, first)
    with held(workspace.task_id, workspace.folder):
        train_until(workspace, 0.5, num_slots=3)
    workspace.store.end_task(workspace.task_id, TaskState.FAILED, "for this test")
    assert workspace.records()[second].state is JobState.CANCELLED, "ended with its task"

    with held(workspace.task_id, workspace.folder):
        take_up(workspace)
        train_until(workspace, 1.0, num_slots=3)

    states = {job_id: record.state for job_id, record in workspace.records().items()}
    assert states == {first: JobState.CANCELLED, second: JobState.FINISHED, last: JobState.FINISHED}
    assert [entry.state for entry in DecisionLog(workspace.folder).exits_of(first)] == [JobState.CANCELLED]


def test_a_request_that_came_too_late_is_not_meant_for_a_revived_job(begin: Callable[[], Workspace]) -> None:
    workspace = begin()
    first, *_ = workspace.jobs
    requests = CancelRequests(workspace.task_id, workspace.store)
    cancel(workspace.task_id, first)
    assert requests.reasons() == {first: "cancelled by a person"}
    workspace.store.append_events(workspace.task_id, [EventDraft(kind="revived", job_id=first, text="again")])
    assert requests.reasons() == CancelRequests(workspace.task_id, workspace.store).reasons() == {}
    cancel(workspace.task_id, first)
    assert list(requests.reasons()) == [first]


def test_a_stranger_is_refused(begin: Callable[[], Workspace]) -> None:
    workspace = begin()
    (job_id, *_) = workspace.jobs
    with pytest.raises(OwnerError, match="mara, who asks to cancel a job of it"):
        ask_to_cancel_job(workspace.store, workspace.task_id, job_id, by=Person(name="mara"))
    assert not [event for event in workspace.store.events(workspace.task_id) if event.kind == "cancel-asked"]
