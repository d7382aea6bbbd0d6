"""List scheduling: go through time, start whatever fits, in a given order. Fast, and always complete."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence

from alto_core.scheduling.instance import Booking, Instance, WaitingTask
from alto_core.scheduling.timeline import HostTimeline


def fifo(tasks: Iterable[WaitingTask]) -> list[WaitingTask]:
    """As they were submitted."""
    return list(tasks)


def shortest_first(tasks: Iterable[WaitingTask]) -> list[WaitingTask]:
    return sorted(tasks, key=lambda task: (task.seconds, task.task_id))


def longest_first(tasks: Iterable[WaitingTask]) -> list[WaitingTask]:
    return sorted(tasks, key=lambda task: (-task.seconds, -task.num_gpus, task.task_id))


def widest_first(tasks: Iterable[WaitingTask]) -> list[WaitingTask]:
    return sorted(tasks, key=lambda task: (-task.num_gpus, -task.seconds, task.task_id))


def largest_first(tasks: Iterable[WaitingTask]) -> list[WaitingTask]:
    """By GPU-seconds."""
    return sorted(tasks, key=lambda task: (-task.area, task.task_id))


def earliest_deadline_first(tasks: Iterable[WaitingTask]) -> list[WaitingTask]:
    """Tasks without a deadline last, the longest of them first."""
    return sorted(
        tasks, key=lambda task: (math.inf if task.deadline is None else task.deadline, -task.seconds, task.task_id)
    )


def fair_order(tasks: Iterable[WaitingTask], usage: Mapping[str, float]) -> list[WaitingTask]:
    """Again and again the longest task of the owner who has had the fewest GPU-seconds so far."""
    left: dict[str, list[WaitingTask]] = {}
    for task in reversed(longest_first(tasks)):
        left.setdefault(task.owner, []).append(task)
    owners = [(usage.get(owner, 0.0), owner) for owner in left]
    heapq.heapify(owners)
    order = []
    while owners:
        used, owner = heapq.heappop(owners)
        task = left[owner].pop()
        order.append(task)
        if left[owner]:
            heapq.heappush(owners, (used + task.area, owner))
    return order


def timelines(instance: Instance, booked: Sequence[Booking] = ()) -> dict[str, HostTimeline]:
    """The free GPUs of every host, given its running tasks and what is booked already."""
    lines = {host.host_id: HostTimeline(len(host.gpus)) for host in instance.hosts}
    for task in instance.running:
        lines[task.host_id].book(len(task.gpus), 0, task.seconds)
    for booking in booked:
        lines[booking.host_id].book(booking.num_gpus, booking.start, booking.end)
    return lines


def list_schedule(
    instance: Instance, order: Sequence[WaitingTask], *, booked: Sequence[Booking] = (), backfill: bool = True
) -> tuple[Booking, ...]:
    """Start every task at the first moment at which it fits and no task before it in the order could start instead.

    Args:
        instance: hosts and running tasks.
        order: the tasks to place; each fits some host of the instance.
        booked: placed before, left as they are.
        backfill: whether tasks may pass one that does not fit yet. Without it the order is also the order of starts.
    """
    lines = timelines(instance, booked)
    moments = {0, *(task.release for task in order)}
    for line in lines.values():
        moments.update(line.times)
    events = sorted(moments)  # a sorted list is a heap
    queue, bookings = list(order), []
    while queue:
        now = heapq.heappop(events)
        while events and events[0] == now:
            heapq.heappop(events)
        released = any(task.release == now for task in queue)
        candidates = lines
        if backfill and not released:
            # a task that was passed over before can start only where GPUs have come free since
            candidates = {host_id: line for host_id, line in lines.items() if _gains(line, now)}
        free = {host_id: line.free_at(now) for host_id, line in candidates.items()}
        left = []
        for position, task in enumerate(queue):
            if task.release > now:
                left.append(task)
                continue
            host_id = _best_fit(instance, task, candidates, free, now)
            if host_id is None:
                left.append(task)
                if not backfill:
                    left.extend(queue[position + 1 :])
                    break
                continue
            end = now + task.seconds
            lines[host_id].book(task.num_gpus, now, end)
            free[host_id] -= task.num_gpus
            heapq.heappush(events, end)
            bookings.append(Booking(task_id=task.task_id, host_id=host_id, num_gpus=task.num_gpus, start=now, end=end))
            if not any(free.values()):
                left.extend(queue[position + 1 :])
                break
        queue = left
    return tuple(bookings)


def _gains(line: HostTimeline, time: int) -> bool:
    """Whether GPUs come free at this time."""
    return time == 0 or line.free_at(time) > line.free_at(time - 1)


def _best_fit(
    instance: Instance, task: WaitingTask, lines: Mapping[str, HostTimeline], free: Mapping[str, int], now: int
) -> str | None:
    """Of the hosts where the task can start now and run to its end, the one that has the fewest GPUs left then."""
    best: str | None = None
    for host_id, num_free in free.items():
        if (
            num_free >= task.num_gpus
            and (best is None or num_free < free[best])
            and task.min_gpu_bytes <= instance.host_by_id[host_id].gpu_bytes
            and lines[host_id].is_free(task.num_gpus, now, now + task.seconds)
        ):
            best = host_id
    return best
