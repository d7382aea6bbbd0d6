"""What Prefect is told about this project: work pools, one deployment per host, and those that plan and reconcile.

`prefect.yaml` says the same of the latter to those who deploy by hand; a test holds the two together.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.events import DeploymentEventTrigger
from prefect.exceptions import ObjectAlreadyExists
from prefect.flows import EntrypointType
from prefect.workers.process import ProcessWorker

CONTROL_POOL = "alto-control"
INTERVAL = timedelta(minutes=5)
"""The safety net: events and the agents of hosts are what wakes planning and reconciling."""
QUEUE_EVENTS = ("alto.task.submitted", "alto.task.unpaused", "alto.host.joined", "alto.host.lost")
RUN_EVENTS = tuple(f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Crashed", "Cancelled"))
RUN_VARIABLES: dict[str, Any] = {
    "stream_output": False,  # a worker that dies must not take its flow along through a broken pipe
    "env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"},
}


def pool_name(host_id: str) -> str:
    """The work pool of a host."""
    return f"alto-{host_id}"


def deploy_host(host_id: str) -> None:
    """Make or renew the pool of a host and the deployment that runs queued tasks there."""
    from flows.tune import tune_queued

    _ensure_pool(pool_name(host_id))
    _apply(
        tune_queued,
        host_id,
        work_pool_name=pool_name(host_id),
        description=f"Tune a queued task on the GPUs claimed for it on {host_id}.",
    )


def deploy_control() -> None:
    """Make or renew the pool and the deployments that plan and reconcile."""
    from flows.reconcile import reconcile
    from flows.schedule import schedule

    _ensure_pool(CONTROL_POOL)
    _apply(
        schedule,
        "schedule",
        work_pool_name=CONTROL_POOL,
        description="Plan the queue and dispatch what starts now.",
        interval=INTERVAL,
        triggers=[
            DeploymentEventTrigger(
                name="replan-when-a-run-ends",
                expect=set(RUN_EVENTS),
                match={"prefect.resource.id": "prefect.flow-run.*"},
                match_related={"prefect.resource.role": "flow", "prefect.resource.name": "tune queued"},
                parameters={"reason": "{{ event.event }}"},
            ),
            DeploymentEventTrigger(
                name="replan-when-the-queue-changes",
                expect=set(QUEUE_EVENTS),
                parameters={"reason": "{{ event.event }}"},
            ),
        ],
    )
    _apply(
        reconcile,
        "reconcile",
        work_pool_name=CONTROL_POOL,
        description="Find dead runs and hosts, and put their tasks back into the queue.",
        interval=INTERVAL,
    )


def _apply(flow: Flow[..., Any], name: str, **options: Any) -> None:
    """Flows are found by module, so that a worker needs the installed package and no checkout."""
    flow.to_deployment(name, job_variables=RUN_VARIABLES, entrypoint_type=EntrypointType.MODULE_PATH, **options).apply()


def _ensure_pool(name: str) -> None:
    with get_client(sync_client=True) as client:
        try:
            client.create_work_pool(
                WorkPoolCreate(
                    name=name, type="process", base_job_template=ProcessWorker.get_default_base_job_template()
                )
            )
        except ObjectAlreadyExists:
            return
