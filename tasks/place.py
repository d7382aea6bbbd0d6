"""A look of the scheduler: plan the queue on the GPUs, keep the plan, return what starts now."""

from __future__ import annotations

from prefect import task

from alto_core.cluster.placing import place_tasks
from alto_core.scheduling.instance import Placement
from alto_core.settings import load_settings


@task(name="place", task_run_name="place")
def place(reason: str) -> list[Placement]:
    """Returns the placements that start now; tasks that have to make room for a deadline are asked to."""
    return list(place_tasks(load_settings(), reason))
