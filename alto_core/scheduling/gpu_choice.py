"""Which GPUs of its host each booked task gets."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from alto_core.scheduling.instance import Booking, Instance, Placement


def choose_gpus(instance: Instance, bookings: Sequence[Booking]) -> tuple[Placement, ...]:
    """Give each task, in order of start, the lowest GPUs that are free then.

    That always works out: intervals that never need more than G GPUs at a time can be coloured with G colours in order
    of their starts.
    """
    free = {host.host_id: sorted(host.gpus) for host in instance.hosts}
    ends: list[tuple[int, str, tuple[int, ...]]] = []
    for task in instance.running:
        free[task.host_id] = [gpu for gpu in free[task.host_id] if gpu not in task.gpus]
        heapq.heappush(ends, (task.seconds, task.host_id, task.gpus))
    placements = []
    for booking in sorted(bookings, key=lambda booking: (booking.start, booking.task_id)):
        while ends and ends[0][0] <= booking.start:
            _, host_id, gpus = heapq.heappop(ends)
            free[host_id] = sorted([*free[host_id], *gpus])
        idle = free[booking.host_id]
        assert len(idle) >= booking.num_gpus, "a booking without free GPUs"
        gpus, free[booking.host_id] = tuple(idle[: booking.num_gpus]), idle[booking.num_gpus :]
        heapq.heappush(ends, (booking.end, booking.host_id, gpus))
        placements.append(
            Placement(task_id=booking.task_id, host_id=booking.host_id, gpus=gpus, start=booking.start, end=booking.end)
        )
    return tuple(placements)
