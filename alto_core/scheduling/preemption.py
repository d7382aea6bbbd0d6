"""Which running tasks to put back into the queue so that a deadline is met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from alto_core.queue_states import Priority
from alto_core.scheduling.effort import PlannerOptions
from alto_core.scheduling.instance import Instance, RunningTask, WaitingTask
from alto_core.scheduling.planner import plan_instance

QUICK = PlannerOptions(seconds=0)


def tasks_to_preempt(instance: Instance, priorities: Mapping[str, Priority], late: Sequence[str]) -> tuple[str, ...]:
    """The running tasks to stop, by checkpoint, for waiting tasks that would miss their deadlines.

    Only tasks of a lower priority class give way, on one host for each late task; of the ways that bring it home in
    time the one that takes back the fewest GPU-seconds of remaining work is chosen. A deadline that is missed in any
    case takes nobody's GPUs.

    Args:
        instance: what waits and runs.
        priorities: classes of the running tasks.
        late: ids of the waiting tasks that the plan lets end after their deadlines.
    """
    chosen: list[str] = []
    for task in sorted((instance.task_by_id[task_id] for task_id in late), key=_urgency):
        running = tuple(one for one in instance.running if one.task_id not in chosen)
        victims = _cheapest(replace(instance, running=running), priorities, task)
        chosen += victims
    return tuple(chosen)


def _urgency(task: WaitingTask) -> tuple[int, int, str]:
    assert task.deadline is not None
    return list(Priority).index(task.priority), task.deadline, task.task_id


def _cheapest(instance: Instance, priorities: Mapping[str, Priority], task: WaitingTask) -> tuple[str, ...]:
    if task.deadline is None or task.seconds > task.deadline:
        return ()
    if _in_time(instance, task):
        return ()
    options = []
    for host in instance.hosts:
        if task.fits(host):
            lower = [
                one for one in instance.running if one.host_id == host.host_id and _gives_way(one, task, priorities)
            ]
            # the least important first, and of those the ones whose remaining work is smallest
            lower.sort(key=lambda one: (-_rank(priorities[one.task_id]), one.seconds * len(one.gpus), one.task_id))
            for number in range(1, len(lower) + 1):
                victims = lower[:number]
                gone = {one.task_id for one in victims}
                rest = tuple(one for one in instance.running if one.task_id not in gone)
                if _in_time(replace(instance, running=rest), task):
                    cost = sum(one.seconds * len(one.gpus) for one in victims)
                    options.append((cost, tuple(one.task_id for one in victims)))
                    break
    return min(options, default=(0, ()))[1]


def _in_time(instance: Instance, task: WaitingTask) -> bool:
    """Whether a plan of this task and what comes before it lets it end by its deadline."""
    before = tuple(other for other in instance.waiting if _rank(other.priority) <= _rank(task.priority))
    plan = plan_instance(replace(instance, waiting=before), QUICK)
    end = next(placement.end for placement in plan.placements if placement.task_id == task.task_id)
    assert task.deadline is not None
    return end <= task.deadline


def _gives_way(one: RunningTask, task: WaitingTask, priorities: Mapping[str, Priority]) -> bool:
    return one.task_id in priorities and _rank(priorities[one.task_id]) > _rank(task.priority)


def _rank(priority: Priority) -> int:
    return list(Priority).index(priority)
