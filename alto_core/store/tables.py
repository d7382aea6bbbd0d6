"""The tables, their version, and the column types that databases disagree on."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import cast

from sqlalchemy import DateTime, Dialect, String, Table, Text, inspect
from sqlalchemy.types import TypeDecorator
from sqlmodel import Field, SQLModel

SCHEMA_VERSION = 1
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


TABLES = [
    cast(Table, inspect(row).local_table) for row in (SchemaRow, TaskNameRow, TaskRow, JobRow, EventRow, ProfileRow)
]
