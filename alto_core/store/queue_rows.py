"""Between the rows of the queue and its values, inside a transaction of `queue` or `fleet`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime

from sqlmodel import Session, select

from alto_core.domain import TaskState
from alto_core.errors import StoreError
from alto_core.ownership import Person
from alto_core.queue_states import Priority, QueueState, StopRequest
from alto_core.store.queue_records import Demand, KeptPlacement, KeptPlan, QueueEntry
from alto_core.store.rows import task_row
from alto_core.store.tables import GpuRow, PlanRow, QueueEventRow, QueueRow, TaskRow


def log_event(
    session: Session, kind: str, text: str, *, task_id: str | None = None, host_id: str | None = None
) -> None:
    """Add what happened to a task or a host."""
    session.add(QueueEventRow(at=now(), kind=kind, text=text, task_id=task_id, host_id=host_id))


def queue_row(session: Session, task_id: str) -> QueueRow:
    """The row of a submitted task.

    Raises:
        StoreError: there is no such task, or it was never submitted.
    """
    row = session.get(QueueRow, task_id)
    if row is None:
        task_row(session, task_id)
        raise StoreError(
            f"task {task_id}: got a task that was never submitted, expected one of `alto queue`. What runs in a "
            "terminal, by `alto tune` or `alto resume`, is ended there by Ctrl-C."
        )
    return row


def require_owner(session: Session, task_id: str, by: Person | None, action: str) -> None:
    """Raise `OwnerError` when somebody acts on a task of someone else's; None is ALTO itself."""
    if by is not None:
        by.require_owner(task_row(session, task_id).owner, f"task {task_id}", action)


def free_gpus(session: Session, row: QueueRow, state: QueueState, reason: str) -> None:
    """Take a task's GPUs back. A task that has not ended is no longer running, in its own record too."""
    for gpu in session.exec(select(GpuRow).where(GpuRow.task_id == row.task_id)):
        gpu.task_id = None
        session.add(gpu)
    row.state, row.gpus, row.stop, row.process_id = state, "[]", None, None
    session.add(row)
    task = task_row(session, row.task_id)
    if state is not QueueState.ENDED and task.state == TaskState.RUNNING:
        task.state = TaskState.QUEUED
        session.add(task)
    log_event(session, "released", f"{state}: {reason}", task_id=row.task_id, host_id=row.host_id)


def queue_entry(row: QueueRow, task: TaskRow) -> QueueEntry:
    demand = Demand(
        num_gpus=row.num_gpus,
        expected_seconds=row.expected_seconds,
        priority=Priority(row.priority),
        deadline=row.deadline,
        min_gpu_bytes=row.min_gpu_bytes,
    )
    return QueueEntry(
        task_id=row.task_id,
        owner=task.owner,
        demand=demand,
        submitted_at=row.submitted_at,
        state=QueueState(row.state),
        attempt=row.attempt,
        num_failures=row.num_failures,
        host_id=row.host_id,
        gpus=tuple(json.loads(row.gpus)),
        claimed_at=row.claimed_at,
        heartbeat_at=row.heartbeat_at,
        process_id=row.process_id,
        flow_run_id=row.flow_run_id,
        stop=StopRequest(row.stop) if row.stop else None,
    )


def plan_row(plan: KeptPlan) -> PlanRow:
    """The row that `kept_plan` reads back."""
    content = {
        "placements": [
            [p.task_id, p.host_id, list(p.gpus), p.start.isoformat(), p.end.isoformat()] for p in plan.placements
        ],
        "refusals": dict(plan.refusals),
    }
    fields = {name: value for name, value in vars(plan).items() if name not in ("placements", "refusals")}
    return PlanRow(**fields, content=json.dumps(content))


def kept_plan(row: PlanRow) -> KeptPlan:
    content = json.loads(row.content)
    placements = tuple(
        KeptPlacement(
            task_id=task_id,
            host_id=host_id,
            gpus=tuple(gpus),
            start=datetime.fromisoformat(start),
            end=datetime.fromisoformat(end),
        )
        for task_id, host_id, gpus, start, end in content["placements"]
    )
    refusals: Mapping[str, str] = content["refusals"]
    return KeptPlan(**row.model_dump(exclude={"plan_id", "content"}), placements=placements, refusals=refusals)


def now() -> datetime:
    return datetime.now(UTC)
