"""Claim GPUs for a placed task and ask the work pool of their host to run it there."""

from __future__ import annotations

import logging

import httpx
from prefect import task
from prefect.deployments import run_deployment
from prefect.exceptions import PrefectException

from alto_core.queue_states import QueueState
from alto_core.scheduling.instance import Placement
from alto_core.settings import load_settings
from alto_core.store import Queue

logger = logging.getLogger(__name__)


@task(name="dispatch", task_run_name="dispatch {placement.task_id}")
def dispatch(placement: Placement) -> str | None:
    """Returns the id of the flow run; None when another scheduler was faster or the host takes no run."""
    queue = Queue(load_settings())
    try:
        attempt = queue.claim(placement.task_id, placement.host_id, placement.gpus)
        if attempt is None:
            return None
        try:
            run = run_deployment(
                f"tune queued/{placement.host_id}",
                parameters={"task_id": placement.task_id, "attempt": attempt},
                job_variables={"env": {"CUDA_VISIBLE_DEVICES": ",".join(map(str, placement.gpus))}},
                flow_run_name=f"tune {placement.task_id}, attempt {attempt}",
                tags=[f"task:{placement.task_id}", f"host:{placement.host_id}"],
                timeout=0,
                as_subflow=False,
            )
        except (PrefectException, httpx.HTTPError) as error:
            logger.warning("%s could not be dispatched to %s: %s", placement.task_id, placement.host_id, error)
            queue.release(placement.task_id, attempt, QueueState.WAITING, f"not dispatched: {error}")
            return None
        queue.note_flow_run(placement.task_id, attempt, str(run.id))
        return str(run.id)
    finally:
        queue.close()
