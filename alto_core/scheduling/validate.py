"""Checks a plan without the solver that may have made it, and without any code that made it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

from alto_core.scheduling.instance import Booking, Instance, Placement, Plan


def plan_faults(instance: Instance, plan: Plan) -> tuple[str, ...]:
    """What is wrong with a plan, one sentence each; nothing when it can be carried out as it stands.

    A plan is right when it places every waiting task exactly once, for exactly its duration, not before its release,
    on as many different GPUs as it needs, all of one host that has them and whose GPUs have the memory; when no GPU has
    two tasks at a time; and when makespan and tardiness are what it says.
    """
    faults = [*_count_faults(instance, plan)]
    known = [placement for placement in plan.placements if placement.task_id in instance.task_by_id]
    for placement in known:
        faults += _placement_faults(instance, placement)
    faults += _overlap_faults(instance, plan)
    ends = [placement.end for placement in plan.placements] + [task.seconds for task in instance.running]
    if plan.makespan != max(ends, default=0):
        faults.append(f"makespan: got {plan.makespan}, expected {max(ends, default=0)}, the last end")
    if plan.bound > plan.makespan:
        faults.append(f"bound: got {plan.bound}, expected at most the makespan, {plan.makespan}")
    late = 0
    for placement in known:
        deadline = instance.task_by_id[placement.task_id].deadline
        if deadline is not None:
            late += max(0, placement.end - max(deadline, 0))
    if plan.tardiness != late:
        faults.append(f"tardiness: got {plan.tardiness}, expected {late}")
    return tuple(faults)


def booking_faults(instance: Instance, bookings: Sequence[Booking], booked: Sequence[Booking] = ()) -> tuple[str, ...]:
    """What is wrong with a solver's bookings of all waiting tasks, before GPUs are chosen for them."""
    placed = Counter(booking.task_id for booking in bookings)
    faults = [f"{task_id}: booked {placed[task_id]} times" for task_id in instance.task_by_id if placed[task_id] != 1]
    for booking in bookings:
        task, host = instance.task_by_id.get(booking.task_id), instance.host_by_id.get(booking.host_id)
        if task is None or host is None:
            faults.append(f"{booking.task_id}: no waiting task, or {booking.host_id} is no host")
        elif booking.num_gpus != task.num_gpus or booking.end - booking.start != task.seconds:
            faults.append(f"{booking.task_id}: booked for another number of GPUs or seconds")
        elif booking.start < task.release or not task.fits(host):
            faults.append(f"{booking.task_id}: starts too early, or does not fit {booking.host_id}")
    steps = [(task.host_id, 0, len(task.gpus)) for task in instance.running]
    steps += [(task.host_id, task.seconds, -len(task.gpus)) for task in instance.running]
    for booking in (*booked, *bookings):
        steps.append((booking.host_id, booking.start, booking.num_gpus))
        steps.append((booking.host_id, booking.end, -booking.num_gpus))
    used: Counter[str] = Counter()
    for host_id, time, change in sorted(steps, key=lambda step: (step[1], step[2])):
        used[host_id] += change
        host = instance.host_by_id.get(host_id)
        if host is not None and used[host_id] > len(host.gpus):
            faults.append(f"{host_id}: {used[host_id]} GPUs in use at {time}")
    return tuple(faults)


def _count_faults(instance: Instance, plan: Plan) -> list[str]:
    placed = Counter(placement.task_id for placement in plan.placements)
    faults = [f"{task_id}: not in the plan" for task_id in instance.task_by_id if not placed[task_id]]
    faults += [f"{task_id}: placed {number} times" for task_id, number in placed.items() if number > 1]
    faults += [f"{task_id}: no waiting task" for task_id in placed if task_id not in instance.task_by_id]
    return faults


def _placement_faults(instance: Instance, placement: Placement) -> list[str]:
    task, host = instance.task_by_id[placement.task_id], instance.host_by_id.get(placement.host_id)
    if host is None:
        return [f"{placement.task_id}: placed on {placement.host_id}, which is no host"]
    faults = []
    if placement.end - placement.start != task.seconds:
        faults.append(f"{task.task_id}: got {placement.end - placement.start} s, expected {task.seconds} s")
    if placement.start < task.release:
        faults.append(f"{task.task_id}: starts at {placement.start}, expected not before {task.release}")
    if len(set(placement.gpus)) != task.num_gpus or len(placement.gpus) != task.num_gpus:
        faults.append(f"{task.task_id}: got GPUs {placement.gpus}, expected {task.num_gpus} different ones")
    if not set(placement.gpus) <= set(host.gpus):
        faults.append(f"{task.task_id}: got GPUs {placement.gpus}, expected some of {host.gpus} on {host.host_id}")
    if task.min_gpu_bytes > host.gpu_bytes:
        faults.append(f"{task.task_id}: needs {task.min_gpu_bytes} bytes a GPU, {host.host_id} has {host.gpu_bytes}")
    return faults


def _overlap_faults(instance: Instance, plan: Plan) -> list[str]:
    spans: dict[tuple[str, int], list[tuple[int, int, str]]] = defaultdict(list)
    for placement in plan.placements:
        for gpu in placement.gpus:
            spans[placement.host_id, gpu].append((placement.start, placement.end, placement.task_id))
    for task in instance.running:
        for gpu in task.gpus:
            spans[task.host_id, gpu].append((0, task.seconds, task.task_id))
    faults = []
    for (host_id, gpu), taken in spans.items():
        taken.sort()
        for (_, end, first), (start, _, second) in pairwise(taken):
            if start < end:
                faults.append(f"GPU {gpu} of {host_id}: {first} until {end} and {second} from {start} on")
    return faults
