"""The frozen values of the queue: entries, hosts, what happened to them, and kept plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from alto_core.queue_states import Priority, QueueState, StopRequest


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a submitted task asks of the cluster."""

    num_gpus: int
    expected_seconds: float
    priority: Priority = Priority.NORMAL
    deadline: datetime | None = None
    min_gpu_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class QueueEntry:
    """A submitted task as it stands. All times are UTC."""

    task_id: str
    owner: str
    demand: Demand
    submitted_at: datetime
    state: QueueState
    attempt: int
    """Counts the claims; names the run that may act for the task."""
    num_failures: int
    """Runs that died without an end of their own."""
    host_id: str | None
    """Where it runs, or ran last."""
    gpus: tuple[int, ...]
    """Held now."""
    claimed_at: datetime | None
    heartbeat_at: datetime | None
    """Last sign of life of its run."""
    process_id: int | None
    flow_run_id: str | None
    stop: StopRequest | None


@dataclass(frozen=True, kw_only=True)
class HostRecord:
    """A host of the cluster."""

    host_id: str
    work_pool: str
    """Prefect's name for where its runs go."""
    gpu_bytes: int
    heartbeat_at: datetime
    is_lost: bool
    holders: Mapping[int, str | None]
    """The task that holds each GPU."""


@dataclass(frozen=True, kw_only=True)
class QueueEvent:
    """Something that happened to the queue or to a host."""

    event_id: int
    at: datetime
    kind: str
    text: str
    task_id: str | None
    host_id: str | None


@dataclass(frozen=True, kw_only=True)
class KeptPlacement:
    """A place in a kept plan, in wall-clock time."""

    task_id: str
    host_id: str
    gpus: tuple[int, ...]
    start: datetime
    end: datetime


@dataclass(frozen=True, kw_only=True)
class KeptPlan:
    """A plan as it was made. `placements` hold running tasks too."""

    at: datetime
    reason: str
    """What made the scheduler look."""
    placements: tuple[KeptPlacement, ...]
    refusals: Mapping[str, str]
    """Why a task cannot be planned, by its id."""
    makespan: int
    bound: int
    gap: float
    tardiness: int
    method: str
    solver_status: str
    solve_seconds: float
