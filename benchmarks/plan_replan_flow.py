"""The stand-in for training in plan_replan.py: a queued task that holds its GPUs for a moment."""

from __future__ import annotations

import time

from prefect import flow

from alto_core.cluster.lease import held_gpus
from alto_core.domain import TaskState
from alto_core.settings import load_settings
from alto_core.store import Store

HOLD_SECONDS = 3.0


@flow(name="tune queued", flow_run_name="hold {task_id}")
def hold(task_id: str, attempt: int) -> None:
    """Begin, wait, end."""
    with held_gpus(task_id, attempt, load_settings()):
        time.sleep(HOLD_SECONDS)
        Store(load_settings()).end_task(task_id, TaskState.FINISHED)
