"""One tuning task through its six stages, as a Prefect flow; and `tune`, which runs it from Python."""

# ruff: noqa: E402 - libraries are imported after the environment is prepared

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from alto_core.settings import load_settings, prepare_environment

prepare_environment(load_settings())  # before torch, Prefect and MLflow read it

import httpx
import pandas as pd
from prefect import State, flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.exceptions import CancelledRun, ObjectNotFound, PrefectException
from prefect.runtime import flow_run
from prefect.states import Cancelled

from alto_core.cluster.lease import EXIT_PATIENCE_SECONDS, held_gpus, outliving_ranks
from alto_core.config import TuningTask
from alto_core.domain import TaskState
from alto_core.errors import StoreError
from alto_core.interruption import TaskStopped
from alto_core.lifecycle import end_task, running
from alto_core.outcomes import Score
from alto_core.preparation import create_task, plan_task
from alto_core.queue_states import StopRequest
from alto_core.registration import publish_report
from alto_core.report import count_samples, job_rows, leaderboard_table
from alto_core.result import RegisteredVersion
from alto_core.store import QueueEntry, Store
from alto_core.workspace import Workspace
from flows.embedded_server import start_embedded_server
from flows.reconcile import mark_crashed
from tasks.continue_training import continue_training
from tasks.evaluate import evaluate
from tasks.gate import gate
from tasks.profile import profile
from tasks.register import register
from tasks.warmup import warmup


@flow(name="tune", flow_run_name="tune {task_id}")
def tune_task(task_id: str) -> str | State[str]:
    """Tune a task that was created before; returns `name/version` of the registered adapter.

    Ctrl-C and SIGTERM end the flow run as Cancelled, the word that the task and its open jobs end with as well.
    """
    return _through_the_stages(task_id)


@flow(name="tune queued", flow_run_name="tune {task_id}, attempt {attempt}")
def tune_queued(task_id: str, attempt: int) -> str | State[str]:
    """Tune a task on the GPUs that the scheduler claimed for it; what the deployments of hosts run.

    A claim can be begun once. A task that is asked to pause or to make room stops at its checkpoints, and the flow run
    ends as Cancelled with that word; the task goes on in another run. SIGTERM asks it to make room; where Prefect sent
    it because the flow run was cancelled there, the task is cancelled.
    """
    try:
        with held_gpus(task_id, attempt, load_settings()) as entry:
            try:
                return _through_the_stages(task_id, entry, patience_seconds=EXIT_PATIENCE_SECONDS)
            except TaskStopped as stopped:
                if stopped.stop is not StopRequest.PREEMPT or not _is_cancelled_in_prefect():
                    raise
                end_task(Workspace.open(task_id), TaskState.CANCELLED, "cancelled in Prefect")
                raise TaskStopped(StopRequest.CANCEL) from None
    except TaskStopped as stopped:
        return Cancelled(message=str(stopped))


def _is_cancelled_in_prefect() -> bool:
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(flow_run.id)).state
    except (PrefectException, httpx.HTTPError):
        return False  # a server that is away has cancelled nothing
    return state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED)


def _through_the_stages(
    task_id: str, entry: QueueEntry | None = None, *, patience_seconds: float = 0.0
) -> str | State[str]:
    try:
        with running(task_id, patience_seconds=patience_seconds) as workspace, outliving_ranks(entry):
            _close_dead_run(workspace.store.task(task_id).flow_run_id)
            workspace.store.set_task_fields(task_id, flow_run_id=flow_run.id)
            revision = workspace.revision
            num_slots = profile(task_id, revision, len(workspace.devices))
            warmup(task_id, revision, num_slots)
            gate(task_id, revision)
            continue_training(task_id, revision, num_slots)
            winner = evaluate(task_id, revision, num_slots)
            registered = register(task_id, revision, winner)
    except KeyboardInterrupt:
        return Cancelled(message="cancelled")
    publish_report(workspace)
    return registered


def _close_dead_run(flow_run_id: str | None) -> None:
    """A run that was killed stays Running in Prefect until it is told that its task goes on in another one."""
    if flow_run_id not in (None, str(flow_run.id)):
        with contextlib.suppress(ObjectNotFound):  # it was another server's
            mark_crashed(flow_run_id, f"its process is gone; the task goes on in flow run {flow_run.id}")


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """What came out of a tuning task."""

    task_id: str
    state: TaskState
    winner: str
    """Job id."""
    leaderboard: pd.DataFrame
    """One row per job, the winner first."""
    scores: tuple[Score, ...]
    adapter_folder: Path
    """The winner's adapter in PEFT format."""
    registered: RegisteredVersion
    report: Path
    seconds: float
    samples_saved: float
    """Share of the training rows that early exit saved."""
    tracking_share: float
    """Share of the wall time spent waiting for MLflow."""


def tune(task: TuningTask, *, task_id: str | None = None, task_file: Path | None = None) -> TuneResult:
    """Check, create and tune a task in this process; returns when it has ended.

    Args:
        task: the task, for example from `load_task`.
        task_id: an id from `Store.new_task_id`; a new one when None.
        task_file: that it was read from; `resume` looks whether it still says the same.

    Raises:
        AltoError: the task, its data or its model cannot be used, or no adapter came out.
        KeyboardInterrupt: the task was interrupted; it and its open jobs are recorded as cancelled.
    """
    settings = load_settings()
    plan = plan_task(task)
    task_id = task_id or Store(settings).new_task_id(task.name)
    create_task(plan, task_id, settings, task_file=task_file)
    return run_task(task_id)


def run_task(task_id: str) -> TuneResult:
    """Run the flow of a task that was created before, in this process, to the task's end.

    Raises:
        AltoError: no adapter came out.
        KeyboardInterrupt: the task was interrupted; it and its open jobs are recorded as cancelled.
    """
    start_embedded_server()
    try:
        tune_task(task_id)
    except CancelledRun:
        raise KeyboardInterrupt from None
    return tune_result(task_id)


def tune_result(task_id: str) -> TuneResult:
    """The result of a task that has finished, read from the store.

    Raises:
        StoreError: there is no such task, or it has not finished.
    """
    workspace = Workspace.open(task_id)
    record, result = workspace.store.task(task_id), workspace.result
    if record.state is not TaskState.FINISHED:
        raise StoreError(f"{task_id} is {record.state}, expected finished. See `alto status {task_id}`.")
    assert result.winner and result.registered and result.adapter_folder
    jobs = job_rows(workspace.store.jobs(task_id))
    return TuneResult(
        task_id=task_id,
        state=record.state,
        winner=result.winner,
        leaderboard=leaderboard(task_id),
        scores=result.scores,
        adapter_folder=Path(result.adapter_folder),
        registered=result.registered,
        report=workspace.report_file,
        seconds=result.seconds or 0.0,
        samples_saved=count_samples(jobs, num_train_rows=result.num_train_rows).saved_share,
        tracking_share=result.tracking_share or 0.0,
    )


def leaderboard(task_id: str) -> pd.DataFrame:
    """Jobs of a task, the winner first; while it runs, as they stand.

    Raises:
        StoreError: there is no such task.
    """
    workspace = Workspace.open(task_id)
    choose_by = workspace.task.evaluation.choose_by
    return leaderboard_table(job_rows(workspace.store.jobs(task_id)), workspace.result, choose_by=choose_by)
