"""Discrete events on the very planner and dispatch rule of a real cluster: tasks arrive, start, and end when they end.

A policy sees what a scheduler would see, estimates and not the true durations, and answers with the placements that
start now. It is asked at every arrival and every end.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from alto_core.queue_states import Priority
from alto_core.scheduling.effort import PlannerOptions
from alto_core.scheduling.gpu_choice import choose_gpus
from alto_core.scheduling.instance import Host, Instance, Placement, RunningTask, WaitingTask
from alto_core.scheduling.list_scheduling import list_schedule
from alto_core.scheduling.planner import plan_instance

Policy = Callable[[Instance], Sequence[Placement]]
Order = Callable[[Iterable[WaitingTask]], Sequence[WaitingTask]]


@dataclass(frozen=True, kw_only=True)
class SimulatedTask:
    """A task with what the scheduler believes and what will happen."""

    task_id: str
    num_gpus: int
    estimated_seconds: int
    true_seconds: int
    """Shorter than the estimate where jobs exit early."""
    arrival: int = 0
    priority: Priority = Priority.NORMAL
    owner: str = "me"
    deadline: int | None = None
    """From the beginning of the simulation."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What came of a policy."""

    runs: tuple[Placement, ...]
    """Each task as it was carried out."""
    makespan: int
    num_plans: int
    busy_gpu_seconds: int
    latency_gpu_seconds: int
    """GPU-seconds that a task which the policy would have started at once had to wait for its start."""

    @property
    def latency_share(self) -> float:
        """GPU time lost to replanning latency, over the GPU time used."""
        return self.latency_gpu_seconds / self.busy_gpu_seconds if self.busy_gpu_seconds else 0.0


def planned(options: PlannerOptions) -> Policy:
    """The planner, as the scheduling flow uses it: replan, start what starts now."""
    return lambda instance: plan_instance(instance, options).starting_now


def listed(order: Order, *, backfill: bool) -> Policy:
    """A queue in this order."""

    def policy(instance: Instance) -> Sequence[Placement]:
        bookings = list_schedule(instance, order(instance.waiting), backfill=backfill)
        return choose_gpus(instance, [booking for booking in bookings if booking.start == 0])

    return policy


def simulate(
    tasks: Sequence[SimulatedTask], hosts: Sequence[Host], policy: Policy, *, latency_seconds: int = 0
) -> Simulation:
    """Run tasks to their end under a policy.

    Args:
        tasks: all tasks, in any order; each fits some host.
        hosts: the cluster.
        policy: what starts now.
        latency_seconds: from an arrival or an end to the starts that follow from it.
    """
    cluster = _Cluster(tasks, hosts)
    num_plans, lost = 0, 0
    while cluster.events:
        cluster.advance()
        if not cluster.waiting:
            continue
        starting = policy(cluster.instance())
        num_plans += 1
        for placement in starting:
            cluster.start(placement, latency_seconds)
            lost += len(placement.gpus) * latency_seconds
    assert not cluster.waiting, "the policy left tasks waiting on an idle cluster"
    runs = tuple(cluster.runs)
    return Simulation(
        runs=runs,
        makespan=max((run.end for run in runs), default=0),
        num_plans=num_plans,
        busy_gpu_seconds=sum(len(run.gpus) * (run.end - run.start) for run in runs),
        latency_gpu_seconds=lost,
    )


class _Cluster:
    def __init__(self, tasks: Sequence[SimulatedTask], hosts: Sequence[Host]):
        self._hosts = tuple(hosts)
        self._tasks: Mapping[str, SimulatedTask] = {task.task_id: task for task in tasks}
        self._now = 0
        self._running: dict[str, Placement] = {}
        self._usage: dict[str, float] = {}
        self.waiting: dict[str, SimulatedTask] = {}
        self.runs: list[Placement] = []
        self.events = [(task.arrival, task.task_id) for task in tasks]
        """Arrivals of tasks that do not run yet, ends of those that do."""
        heapq.heapify(self.events)

    def advance(self) -> None:
        """Go to the next moment at which something happens, and let all of it happen."""
        self._now = self.events[0][0]
        while self.events and self.events[0][0] == self._now:
            _, task_id = heapq.heappop(self.events)
            if self._running.pop(task_id, None) is None:
                self.waiting[task_id] = self._tasks[task_id]

    def start(self, placement: Placement, latency_seconds: int) -> None:
        task = self.waiting.pop(placement.task_id)
        start = self._now + latency_seconds
        run = Placement(
            task_id=task.task_id,
            host_id=placement.host_id,
            gpus=placement.gpus,
            start=start,
            end=start + task.true_seconds,
        )
        self._running[task.task_id] = run
        self._usage[task.owner] = self._usage.get(task.owner, 0.0) + task.num_gpus * task.true_seconds
        self.runs.append(run)
        heapq.heappush(self.events, (run.end, run.task_id))

    def instance(self) -> Instance:
        """What a scheduler sees now."""
        waiting = tuple(
            WaitingTask(
                task_id=task.task_id,
                num_gpus=task.num_gpus,
                seconds=task.estimated_seconds,
                priority=task.priority,
                owner=task.owner,
                deadline=None if task.deadline is None else task.deadline - self._now,
            )
            for task in self.waiting.values()
        )
        running = tuple(
            RunningTask(
                task_id=run.task_id,
                host_id=run.host_id,
                gpus=run.gpus,
                seconds=max(1, self._tasks[run.task_id].estimated_seconds - (self._now - run.start)),
            )
            for run in self._running.values()
        )
        return Instance(hosts=self._hosts, waiting=waiting, running=running, usage=self._usage)
