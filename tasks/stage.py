"""How a stage is run by Prefect: its result is kept as JSON and re-used when the same task's flow is run again.

The key of a kept result is the stage's name and its arguments, ids and small values. Prefect's own INPUTS policy leaves
the name out, so that stages with equal arguments would take each other's results; its default policy puts the code in,
so that an edit would repeat hours of training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import task
from prefect.context import TaskRunContext
from prefect.tasks import Task

P = ParamSpec("P")
R = TypeVar("R")


def stage(name: str) -> Callable[[Callable[P, R]], Task[P, R]]:
    """Make a function a stage: `@stage("warmup")`. Its arguments must tell one run of a task from any other."""

    def result_key(_: TaskRunContext, arguments: dict[str, Any]) -> str:
        return "-".join(["alto", name, *(f"{value}" for value in arguments.values())])

    def wrap(function: Callable[P, R]) -> Task[P, R]:
        return task(
            function,
            name=name,
            task_run_name=name,
            persist_result=True,
            cache_key_fn=result_key,
            result_serializer="json",
        )

    return wrap
