"""The tables, their version, and the column types that databases disagree on."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import cast

from sqlalchemy import BigInteger, DateTime, Dialect, String, Table, Text, inspect
from sqlalchemy.types import TypeDecorator
from sqlmodel import Field, SQLModel

SCHEMA_VERSION = 2
"""Rises with every change of a table."""


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime in UTC; SQLite itself forgets the zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        assert value is None or value.tzinfo is not None, "datetimes in the store are aware"
        return value and value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value and (value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC))


class ExactFloat(TypeDecorator[float]):
    """A float as text: SQLite turns NaN into NULL, and NULL here means "not measured"."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: Dialect) -> str | None:
        return None if value is None else repr(float(value))

    def process_result_value(self, value: str | None, dialect: Dialect) -> float | None:
        return None if value is None else float(value)


class SchemaRow(SQLModel, table=True):
    __tablename__ = "alto_schema"

    version: int = Field(primary_key=True)


class TaskNameRow(SQLModel, table=True):
    """The last number given to a task name, in lower case: folders must differ on every file system."""

    __tablename__ = "alto_task_name"

    name: str = Field(primary_key=True)
    last_number: int


class TaskRow(SQLModel, table=True):
    __tablename__ = "alto_task"

    task_id: str = Field(primary_key=True)
    name: str = Field(index=True)
    owner: str
    state: str = Field(index=True)
    stage: str | None = None
    digest: str
    content: str = Field(sa_type=Text)
    created_at: datetime = Field(sa_type=UtcDateTime)
    started_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    ended_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    message: str = ""
    parent_run_id: str | None = None
    flow_run_id: str | None = None
    winner_job_id: str | None = None
    registered_name: str | None = None
    registered_version: int | None = None
    report_path: str | None = None
    result: str | None = Field(default=None, sa_type=Text)


class JobRow(SQLModel, table=True):
    __tablename__ = "alto_job"

    task_id: str = Field(primary_key=True, foreign_key="alto_task.task_id")
    job_id: str = Field(primary_key=True)
    position: int
    """Place in the search space."""
    params: str = Field(sa_type=Text)
    state: str
    reason: str = ""
    step: int = 0
    total_steps: int
    warmup_steps: int
    train_loss: float | None = Field(default=None, sa_type=ExactFloat)
    val_loss: float | None = Field(default=None, sa_type=ExactFloat)
    best_val_loss: float | None = Field(default=None, sa_type=ExactFloat)
    best_step: int | None = None
    gate_rank: int | None = None
    run_id: str | None = None


class EventRow(SQLModel, table=True):
    __tablename__ = "alto_event"
    __table_args__ = {"sqlite_autoincrement": True}  # ids are never given twice

    event_id: int | None = Field(default=None, primary_key=True)
    task_id: str = Field(foreign_key="alto_task.task_id", index=True)
    at: datetime = Field(sa_type=UtcDateTime)
    kind: str
    text: str = Field(sa_type=Text)
    job_id: str | None = None
    numbers: str = Field(sa_type=Text)


class ProfileRow(SQLModel, table=True):
    __tablename__ = "alto_profile"

    key: str = Field(primary_key=True)
    profile: str = Field(sa_type=Text)


class QueueRow(SQLModel, table=True):
    """A task that was submitted to the cluster."""

    __tablename__ = "alto_queue"

    task_id: str = Field(primary_key=True, foreign_key="alto_task.task_id")
    priority: str
    deadline: datetime | None = Field(default=None, sa_type=UtcDateTime)
    num_gpus: int
    min_gpu_bytes: int = Field(default=0, sa_type=BigInteger)
    expected_seconds: float
    submitted_at: datetime = Field(sa_type=UtcDateTime)
    state: str = Field(index=True)
    attempt: int = 0
    """Counts the claims. What acts for a run names its attempt, so that a run that was given up can do nothing."""
    num_failures: int = 0
    """Runs that died without an end of their own."""
    host_id: str | None = None
    gpus: str = "[]"
    claimed_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    heartbeat_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    process_id: int | None = None
    flow_run_id: str | None = None
    stop: str | None = None


class HostRow(SQLModel, table=True):
    __tablename__ = "alto_host"

    host_id: str = Field(primary_key=True)
    work_pool: str
    gpu_bytes: int = Field(default=0, sa_type=BigInteger)
    heartbeat_at: datetime = Field(sa_type=UtcDateTime)
    is_lost: bool = False


class GpuRow(SQLModel, table=True):
    """A GPU and the one task that holds it."""

    __tablename__ = "alto_gpu"

    host_id: str = Field(primary_key=True, foreign_key="alto_host.host_id")
    gpu: int = Field(primary_key=True)
    task_id: str | None = Field(default=None, foreign_key="alto_queue.task_id")
    process_id: int | None = None
    """Of the run that used it last; it may still be about to exit."""


class PlanRow(SQLModel, table=True):
    __tablename__ = "alto_plan"
    __table_args__ = {"sqlite_autoincrement": True}

    plan_id: int | None = Field(default=None, primary_key=True)
    at: datetime = Field(sa_type=UtcDateTime)
    reason: str
    """What made the scheduler look."""
    makespan: int
    bound: int
    gap: float
    tardiness: int
    method: str
    solver_status: str
    solve_seconds: float
    content: str = Field(sa_type=Text)
    """Placements and refusals as JSON."""


class QueueEventRow(SQLModel, table=True):
    """What happened to the queue and the hosts. Rows are added, never changed."""

    __tablename__ = "alto_queue_event"
    __table_args__ = {"sqlite_autoincrement": True}

    event_id: int | None = Field(default=None, primary_key=True)
    at: datetime = Field(sa_type=UtcDateTime)
    kind: str = Field(index=True)
    text: str = Field(sa_type=Text)
    task_id: str | None = Field(default=None, index=True)
    host_id: str | None = None


def _table(row: type[SQLModel]) -> Table:
    return cast(Table, inspect(row).local_table)


TABLES = [
    _table(row)
    for row in (
        *(SchemaRow, TaskNameRow, TaskRow, JobRow, EventRow, ProfileRow),
        *(QueueRow, HostRow, GpuRow, PlanRow, QueueEventRow),
    )
]
"""In the order in which they can be made."""
