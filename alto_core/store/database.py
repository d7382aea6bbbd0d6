"""Opens the store's database and gives sessions that lose no update, whichever processes write at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, NullPool, event, inspect, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlmodel import Session, SQLModel, create_engine, select

from alto_core.errors import StoreError
from alto_core.settings import Settings
from alto_core.store.migrations import STEPS, migrate
from alto_core.store.tables import SCHEMA_VERSION, TABLES, SchemaRow

WRITE_LOCK = 4_705_426
"""The advisory lock of PostgreSQL that all writers of a store take."""
BUSY_TIMEOUT_MS = 30_000
"""How long a writer waits for another one."""


class Database:
    """One database, made ready at once.

    Raises:
        StoreError: it cannot be opened, or another version of ALTO made it.
    """

    def __init__(self, url: str):
        # A server counts its connections, and many processes open stores: none is kept between two transactions.
        try:
            is_server = make_url(url).get_backend_name() != "sqlite"
            engine = create_engine(url, poolclass=NullPool if is_server else None)
        except (SQLAlchemyError, ImportError) as error:
            raise StoreError(
                f"ALTO_STORE_URL: got an address that cannot be used ({error}), expected one such as "
                'postgresql://user:password@host/alto, with `pip install "alto-lora[postgres]"`'
            ) from None
        self._url = engine.url.render_as_string(hide_password=True)
        self._readers: Engine = engine
        if engine.dialect.name == "sqlite":
            event.listen(engine, "connect", _prepare_sqlite_connection)
            event.listen(engine, "begin", _begin_sqlite_transaction)
        elif engine.dialect.name == "postgresql":
            event.listen(engine, "begin", _begin_postgresql_transaction)
            self._readers = engine.execution_options(isolation_level="REPEATABLE READ")
        self._writers: Engine = engine.execution_options(alto_writes=True)
        self._prepare()

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session that sees one moment of the database."""
        with self._translated(), Session(self._readers) as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A session that is alone in writing from its beginning, and commits at its end unless something is raised."""
        with self._translated(), Session(self._writers, expire_on_commit=False) as session, session.begin():
            yield session

    def close(self) -> None:
        """Close the connections."""
        self._readers.dispose()

    def _prepare(self) -> None:
        with self.reading() as session:
            is_new = not inspect(session.connection()).has_table(SchemaRow.__tablename__)
        if is_new:
            with self.writing() as session:
                SQLModel.metadata.create_all(session.connection(), tables=TABLES)
                if not session.exec(select(SchemaRow)).all():
                    session.add(SchemaRow(version=SCHEMA_VERSION))
        versions = self._versions()
        if len(versions) == 1 and versions[0] in STEPS:
            with self.writing() as session:
                migrate(session)
            versions = self._versions()
        if list(versions) != [SCHEMA_VERSION]:
            found = ", ".join(map(str, versions)) or "none"
            raise StoreError(
                f"store {self._url}: got schema version {found}, expected {SCHEMA_VERSION}. Use the ALTO version that "
                "made it, or set ALTO_HOME to a new folder."
            )

    def _versions(self) -> Sequence[int]:
        with self.reading() as session:
            return session.exec(select(SchemaRow.version)).all()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            first_line = str(error).splitlines()[0]
            raise StoreError(
                f"store {self._url}: got {first_line}, expected a database of ALTO that can be read and written. Check "
                "ALTO_HOME, its permissions and the disk."
            ) from error


class StorePart:
    """Some tables of one ALTO home and what is asked of them, with a database of its own.

    Raises:
        StoreError: the database cannot be opened, or another version of ALTO made it.
    """

    def __init__(self, settings: Settings):
        settings.make_home()
        self._database = Database(settings.store_url)

    def close(self) -> None:
        """Close the connections to the database."""
        self._database.close()


def _prepare_sqlite_connection(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # the driver begins no transactions of its own
    for pragma in ("journal_mode=WAL", f"busy_timeout={BUSY_TIMEOUT_MS}", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite_transaction(connection: Connection) -> None:
    """Read-then-write transactions take the write lock first: with SQLite's default, concurrent updates get lost."""
    writes = connection.get_execution_options().get("alto_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _begin_postgresql_transaction(connection: Connection) -> None:
    """The same rule as on SQLite: who writes is alone in writing, from the beginning of the transaction."""
    if connection.get_execution_options().get("alto_writes", False):
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITE_LOCK})")
