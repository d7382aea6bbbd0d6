"""The values of planning: hosts with GPUs, waiting and running tasks, and where a plan puts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from alto_core.queue_states import Priority


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine whose GPUs are of one kind. A task runs on GPUs of one host."""

    host_id: str
    gpus: tuple[int, ...]
    """Indices of the GPUs that may be used."""
    gpu_bytes: int = 0
    """Memory of each GPU."""


@dataclass(frozen=True, kw_only=True)
class WaitingTask:
    """A task to be placed, checked by `admission`."""

    task_id: str
    num_gpus: int
    seconds: int
    """Expected duration, at least 1."""
    priority: Priority = Priority.NORMAL
    owner: str = "me"
    release: int = 0
    """Earliest start."""
    deadline: int | None = None
    """When it should have ended; may be in the past."""
    min_gpu_bytes: int = 0
    """Memory that each of its GPUs must have."""

    @property
    def area(self) -> int:
        """GPU-seconds."""
        return self.num_gpus * self.seconds

    def fits(self, host: Host) -> bool:
        """Whether the host, all of it free, could run the task."""
        return self.num_gpus <= len(host.gpus) and self.min_gpu_bytes <= host.gpu_bytes


@dataclass(frozen=True, kw_only=True)
class RunningTask:
    """A task that holds GPUs now, and keeps them until it ends."""

    task_id: str
    host_id: str
    gpus: tuple[int, ...]
    seconds: int
    """Expected remaining time, at least 1."""


@dataclass(frozen=True, kw_only=True)
class Instance:
    """What there is to plan."""

    hosts: tuple[Host, ...]
    waiting: tuple[WaitingTask, ...]
    running: tuple[RunningTask, ...] = ()
    usage: Mapping[str, float] = field(default_factory=dict)
    """GPU-seconds that each owner has had lately, running tasks included; what fair share is measured against."""

    @property
    def num_gpus(self) -> int:
        return sum(len(host.gpus) for host in self.hosts)

    @cached_property
    def host_by_id(self) -> Mapping[str, Host]:
        return {host.host_id: host for host in self.hosts}

    @cached_property
    def task_by_id(self) -> Mapping[str, WaitingTask]:
        return {task.task_id: task for task in self.waiting}

    def of_priority(self, priority: Priority) -> tuple[WaitingTask, ...]:
        return tuple(task for task in self.waiting if task.priority is priority)


@dataclass(frozen=True, kw_only=True)
class Booking:
    """A task on a host from `start` to `end`; which of the host's GPUs is decided last."""

    task_id: str
    host_id: str
    num_gpus: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A task on GPUs of a host from `start` to `end`."""

    task_id: str
    host_id: str
    gpus: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A task that no plan can hold, and why."""

    task_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where and when every task runs, and how good that is known to be."""

    placements: tuple[Placement, ...]
    """In order of start."""
    makespan: int
    """When the last task ends, running ones included; 0 for no task at all."""
    bound: int
    """No plan of these tasks can end earlier."""
    tardiness: int
    """Seconds by which deadlines are missed, summed over the tasks."""
    method: str
    """What made it: a list order, `lanes`, `branching`, `cp-sat`, or several of them for several priority classes."""
    solver_status: str
    """Of CP-SAT, for example OPTIMAL or UNKNOWN; empty when it was not needed."""
    solve_seconds: float
    refusals: tuple[Refusal, ...] = ()

    @property
    def gap(self) -> float:
        """Makespan over bound, less one: at most this much could be gained."""
        return self.makespan / self.bound - 1 if self.bound else 0.0

    @property
    def starting_now(self) -> tuple[Placement, ...]:
        return tuple(placement for placement in self.placements if placement.start == 0)


def tardiness_of(tasks: Mapping[str, WaitingTask], bookings: Sequence[Booking]) -> int:
    """Seconds by which these tasks miss their deadlines, summed."""
    total = 0
    for booking in bookings:
        task = tasks.get(booking.task_id)
        if task is not None and task.deadline is not None:
            total += max(0, booking.end - max(task.deadline, 0))
    return total
