"""From the tables of an older version to the current ones, one step a version."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sqlalchemy import Connection, delete
from sqlmodel import Session, SQLModel, select

from alto_core.store.tables import SCHEMA_VERSION, TABLES, SchemaRow


def _add_the_queue(connection: Connection) -> None:
    """Version 2: queue, hosts, GPUs, plans and their events."""
    new = ("alto_queue", "alto_host", "alto_gpu", "alto_plan", "alto_queue_event")
    SQLModel.metadata.create_all(connection, tables=[table for table in TABLES if table.name in new])


STEPS: Mapping[int, Callable[[Connection], None]] = {1: _add_the_queue}
"""By the version that a step starts from."""


def migrate(session: Session) -> None:
    """Bring an older database up to date inside this transaction; one of an unknown version is left as it is."""
    version = session.exec(select(SchemaRow.version)).one()
    while version in STEPS:
        STEPS[version](session.connection())
        version += 1
    if version == SCHEMA_VERSION:
        session.exec(delete(SchemaRow))
        session.add(SchemaRow(version=version))
