"""The reconciling flow: dead runs, dead hosts and leaked GPUs are found, and their tasks put back into the queue.

What tasks logged while MLflow was away is delivered as well.
"""

# ruff: noqa: E402 - libraries are imported after the environment is prepared

from __future__ import annotations

from uuid import UUID

from alto_core.settings import load_settings, prepare_environment

prepare_environment(load_settings())  # before Prefect reads it

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.states import Crashed

from alto_core.cluster.leftovers import deliver_leftovers
from alto_core.cluster.recovery import Finding, recover
from alto_core.domain import QueueState
from alto_core.store import Queue


@flow(name="reconcile")
def reconcile() -> list[str]:
    """Returns what was found, one sentence each: what was dead, and what MLflow had not got."""
    return [finding.text for finding in (*take_back(), *deliver_leftovers(load_settings()))]


def take_back() -> tuple[Finding, ...]:
    """Compare the queue with Prefect and with the signs of life; Prefect's view is mended after the queue."""
    settings = load_settings()
    queue = Queue(settings)
    run_ids = [e.flow_run_id for e in queue.entries(QueueState.CLAIMED, QueueState.RUNNING) if e.flow_run_id]
    queue.close()
    findings = recover(settings, ended_flow_runs=_ended(run_ids))
    for finding in findings:
        if finding.flow_run_id is not None:
            _mark_crashed(finding.flow_run_id, finding.text)
    return findings


def _ended(run_ids: list[str]) -> dict[str, str]:
    """State names of those flow runs that have ended."""
    if not run_ids:
        return {}
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[UUID(i) for i in run_ids])))
    return {str(run.id): run.state.name for run in runs if run.state is not None and run.state.is_final()}


def _mark_crashed(run_id: str, why: str) -> None:
    """A flow run that died without a word stays Running in Prefect for ever unless it is told."""
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(UUID(run_id))
        if run.state is None or not run.state.is_final():
            client.set_flow_run_state(UUID(run_id), Crashed(message=why), force=True)
