"""From what users and profiles say to tasks that can be planned: checked, durations rounded up, misfits named."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alto_core.queue_states import Priority
from alto_core.scheduling.instance import Host, Refusal, WaitingTask

MAX_SECONDS = 10 * 365 * 24 * 3600
"""Ten years. Sums over many thousand tasks stay far inside what the solver can count."""


@dataclass(frozen=True, kw_only=True)
class TaskRequest:
    """A task as it was asked for. Nothing about it is trusted yet."""

    task_id: str
    num_gpus: Any
    seconds: Any
    priority: Priority = Priority.NORMAL
    owner: str = "me"
    release: Any = 0
    deadline: Any = None
    min_gpu_bytes: Any = 0


def admit(
    requests: Sequence[TaskRequest], hosts: Sequence[Host]
) -> tuple[tuple[WaitingTask, ...], tuple[Refusal, ...]]:
    """Separate the tasks that these hosts could run from those that no plan can hold.

    Returns:
        The tasks, in their order, and a refusal for each of the others. An id that comes twice is refused the second
        time.
    """
    tasks: dict[str, WaitingTask] = {}
    refusals = []
    for request in requests:
        try:
            if request.task_id in tasks:
                raise ValueError("got an id that was there before, expected each task once")
            tasks[request.task_id] = _checked(request, hosts)
        except ValueError as error:
            refusals.append(Refusal(task_id=request.task_id, reason=str(error)))
    return tuple(tasks.values()), tuple(refusals)


def _checked(request: TaskRequest, hosts: Sequence[Host]) -> WaitingTask:
    num_gpus = _count("num_gpus", request.num_gpus, least=1)
    task = WaitingTask(
        task_id=request.task_id,
        num_gpus=num_gpus,
        seconds=max(1, _whole_seconds("expected seconds", request.seconds, least=0)),
        priority=request.priority,
        owner=request.owner,
        release=_whole_seconds("release", request.release, least=0),
        deadline=None if request.deadline is None else _whole_seconds("deadline", request.deadline, least=-MAX_SECONDS),
        min_gpu_bytes=_count("min_gpu_bytes", request.min_gpu_bytes, least=0),
    )
    if not any(task.fits(host) for host in hosts):
        raise ValueError(_misfit(task, hosts))
    return task


def _count(name: str, value: Any, *, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name}: got {value!r}, expected a whole number") from None
    if isinstance(value, bool) or not least <= number < 2**62:
        raise ValueError(f"{name}: got {value!r}, expected a whole number of at least {least}")
    return number


def _whole_seconds(name: str, value: Any, *, least: float) -> int:
    """Rounded up, so that no plan promises less time than was asked for."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not least <= value <= MAX_SECONDS:  # a NaN compares false
        raise ValueError(f"{name}: got {value!r}, expected {least} to {MAX_SECONDS} seconds")
    return math.ceil(value)


def _misfit(task: WaitingTask, hosts: Sequence[Host]) -> str:
    if not hosts:
        return "got no host with GPUs, expected at least one. Start one with `alto up`."
    most = max(len(host.gpus) for host in hosts)
    if task.num_gpus > most:
        return f"num_gpus: got {task.num_gpus}, expected at most {most}, as many as the largest host has"
    largest = max(host.gpu_bytes for host in hosts if len(host.gpus) >= task.num_gpus)
    return (
        f"min_gpu_bytes: got {task.min_gpu_bytes} for {task.num_gpus} GPUs of one host, expected at most {largest}, "
        "the memory of the largest such GPUs"
    )
