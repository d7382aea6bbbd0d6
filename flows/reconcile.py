"""The reconciling flow: dead runs, dead hosts and leaked GPUs are found, and every record is set to the truth.

The queue and the locks of tasks know who lives. The store and MLflow follow them here, and Prefect last, where the run
of a process that died without a word stays Running for ever unless it is told. What tasks logged while MLflow was away
is delivered as well.
"""

# ruff: noqa: E402 - libraries are imported after the environment is prepared

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

from alto_core.settings import Settings, load_settings, prepare_environment

prepare_environment(load_settings())  # before Prefect reads it

from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

from alto_core.cluster.dead_tasks import end_dead_tasks
from alto_core.cluster.leftovers import deliver_leftovers
from alto_core.cluster.recovery import Finding, recover
from alto_core.errors import StoreError
from alto_core.queue_states import QueueState
from alto_core.store import Queue, Store

RUN_FLOWS = ("tune queued", "tune")
"""Flows that train a task; `tune file` is an outer one."""
OPEN_STATES = (StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.CANCELLING)


@flow(name="reconcile")
def reconcile() -> list[str]:
    """Returns what was found, one sentence each: what was dead, and what MLflow had not got."""
    return [finding.text for finding in (*sweep(), *deliver_leftovers(load_settings()))]


def take_back() -> tuple[Finding, ...]:
    """What planning has to know first: which runs are dead, by signs of life and by Prefect. Frees their GPUs."""
    settings = load_settings()
    queue = Queue(settings)
    run_ids = [e.flow_run_id for e in queue.entries(QueueState.CLAIMED, QueueState.RUNNING) if e.flow_run_id]
    queue.close()
    findings = recover(settings, ended_flow_runs=_ended(run_ids))
    tell_prefect(findings)
    return findings


def sweep() -> tuple[Finding, ...]:
    """The same, and tasks outside of the queue, and whatever Prefect takes for open that is not."""
    settings = load_settings()
    findings = take_back()
    dead = end_dead_tasks(settings)
    tell_prefect(dead)
    queue = Queue(settings)
    with get_client(sync_client=True) as client:
        for run in _open_runs(client):
            why = _why_over(run, queue, settings)
            if why is not None:
                _mark_crashed(client, run.id, why)
    queue.close()
    return (*findings, *dead)


def tell_prefect(findings: Sequence[Finding]) -> None:
    """Mark the flow runs that were found dead. Where nothing was found Prefect is not asked."""
    for finding in findings:
        if finding.flow_run_id is not None:
            with contextlib.suppress(ObjectNotFound):  # of another Prefect, or deleted
                mark_crashed(finding.flow_run_id, finding.text)


def mark_crashed(run_id: str, why: str) -> None:
    """Mark a flow run that died without a word, its stages, and the flow run that it is a part of.

    Raises:
        ObjectNotFound: this Prefect has no such flow run.
    """
    with get_client(sync_client=True) as client:
        _mark_crashed(client, UUID(run_id), why)


def _ended(run_ids: list[str]) -> dict[str, str]:
    """State names of those flow runs that have ended."""
    if not run_ids:
        return {}
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[UUID(i) for i in run_ids])))
    return {str(run.id): run.state.name for run in runs if run.state is not None and run.state.is_final()}


def _open_runs(client: SyncPrefectClient) -> list[FlowRun]:
    is_open = FlowRunFilterState(type=FlowRunFilterStateType(any_=list(OPEN_STATES)))
    return client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=list(RUN_FLOWS))), flow_run_filter=FlowRunFilter(state=is_open)
    )


def _why_over(run: FlowRun, queue: Queue, settings: Settings) -> str | None:
    """Why a flow run that Prefect takes for open is none; a run that has ended is given a lease to say so itself."""
    task_id, attempt = str(run.parameters.get("task_id")), run.parameters.get("attempt")
    since = datetime.now(UTC) - timedelta(seconds=settings.lease_seconds)
    store = Store(settings)
    try:
        if attempt is None:
            ended_at = store.task(task_id).ended_at
            return f"task {task_id} has ended" if ended_at is not None and ended_at < since else None
        entry = queue.entry(task_id)
        if entry.attempt == attempt and entry.state.holds_gpus:
            return None
        released = [event.at for event in queue.events(task_id=task_id) if event.kind == "released"]
        return f"attempt {attempt} of task {task_id} was given up" if released and released[-1] < since else None
    except StoreError:
        return None  # a task of another store
    finally:
        store.close()


def _mark_crashed(client: SyncPrefectClient, run_id: UUID, why: str) -> None:
    run = client.read_flow_run(run_id)
    if run.state is None or not run.state.is_final():
        client.set_flow_run_state(run_id, Crashed(message=why), force=True)
    is_open = TaskRunFilterState(type=TaskRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING]))
    for stage in client.read_task_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])), task_run_filter=TaskRunFilter(state=is_open)
    ):
        client.set_task_run_state(stage.id, Crashed(message=why), force=True)
    if run.parent_task_run_id is not None:
        outer = client.read_task_run(run.parent_task_run_id).flow_run_id
        if outer is not None:
            _mark_crashed(client, outer, why)
