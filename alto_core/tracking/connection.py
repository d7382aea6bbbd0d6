"""The way to MLflow: one client, patience with what passes, plain errors for what does not, and a clock on both sides.

What is written and read stands in `runs`, `delivery`, `history` and `registry`.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import requests
from filelock import FileLock
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException, RestException

from alto_core.errors import TrackingError
from alto_core.ownership import Person
from alto_core.redaction import without_secrets
from alto_core.settings import Settings
from alto_core.tracking.identity import LOGIN_HINT, person_of

PATIENCE_SECONDS = 30.0
"""How long a call is repeated while MLflow is away, busy or locked."""

CLIENT_DEFAULTS = {
    # MLflow repeats a request for four minutes by default; our own patience decides, and a trainer must not hang
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}

_PASSING_CODES = frozenset({"TEMPORARILY_UNAVAILABLE", "RESOURCE_EXHAUSTED", "REQUEST_LIMIT_EXCEEDED"})
"""Error codes of a server that is busy, and of a locked or full database."""

_PASSING_TEXT = re.compile("failed with exception|OperationalError|is locked|timed out")
"""MLflow gives the code INTERNAL_ERROR to anything; these are the ones that pass: no connection, no database."""

_PASSING_STATUSES = frozenset(
    {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.LOCKED, HTTPStatus.TOO_MANY_REQUESTS}
)
"""Of those below 500, which say that the request itself is at fault."""

_PASSING_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE})
"""A full disk, or a file system that is away."""

P = ParamSpec("P")
T = TypeVar("T")


class Stopwatch:
    """Adds up the wall time of its blocks; a block inside another of the same thread counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._inside = threading.local()

    @contextmanager
    def running(self) -> Iterator[None]:
        if getattr(self._inside, "yes", False):
            yield
            return
        self._inside.yes = True
        start = time.perf_counter()
        try:
            yield
        finally:
            self._inside.yes = False
            with self._lock:
                self.seconds += time.perf_counter() - start


class Connection:
    """One MLflow, embedded or a server. Opening it prepares the embedded database.

    Raises:
        TrackingError: the embedded database is none of MLflow's.
    """

    def __init__(self, settings: Settings):
        self.home = settings.home
        self.wait_seconds = settings.tracking_wait_seconds
        """How long the end of a task waits for an MLflow that is away."""
        self.uri = settings.mlflow_tracking_uri
        self.database = _sqlite_path(self.uri)
        self.is_server = self.uri.startswith(("http://", "https://"))
        self.artifact_location = settings.artifacts.as_uri() if self.database else None
        """Root of new experiments; a server decides itself."""
        self.callers = Stopwatch()
        """Time that callers were held up."""
        self.background = Stopwatch()
        """Time that the writer threads worked."""
        settings.make_home()
        os.environ.update(settings.logins)
        for name, value in CLIENT_DEFAULTS.items():
            os.environ.setdefault(name, value)
        # its two lines about new tables would land in the middle of the live display
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        with self.callers.running(), self.exclusive():
            if self.database:
                _use_write_ahead_log(self.database)
            self.client = MlflowClient(self.uri, registry_uri=self.uri)
            self.workspace = _workspace_id(self.home / "workspace-id")
            if self.database:  # makes its tables; a busy one is as good as a server that is away
                with suppress(UnreachableError):
                    self.attempt("open the tracking store", self.client.search_experiments, max_results=1)

    @functools.cached_property
    def person(self) -> Person:
        """Who is logged in; nobody where MLflow is a database."""
        return person_of(self.uri, self.call) if self.is_server else Person()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other processes of this ALTO home out, while something is created that must exist once."""
        with FileLock(self.home / "tracking.lock"):
            yield

    def call(self, what: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call MLflow; repeat what may pass for `PATIENCE_SECONDS`.

        Args:
            what: what the call is for, as in "could not {what}".

        Raises:
            TrackingError: MLflow refused, or stayed away.
        """
        start, pause = time.monotonic(), 0.05
        while True:
            try:
                return self.attempt(what, function, *args, **kwargs)
            except UnreachableError:
                if time.monotonic() + pause > start + PATIENCE_SECONDS:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, 2.0)

    def attempt(self, what: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call MLflow once.

        Args:
            what: what the call is for, as in "could not {what}".

        Raises:
            UnreachableError: the same call may work later.
            TrackingError: MLflow refused.
        """
        try:
            return function(*args, **kwargs)
        except (MlflowException, requests.RequestException, OSError) as error:
            raise self._tracking_error(what, error) from error

    def _tracking_error(self, what: str, error: Exception) -> TrackingError:
        place = without_secrets(self.uri)
        told = " ".join(str(error).split())[:500]
        if is_passing(error):
            return UnreachableError(
                f"could not {what}: MLflow at {place} gave no answer ({told}). Check that it runs and that its disk is "
                "not full, then resume the task."
            )
        hint = ""
        if _status(error) == HTTPStatus.UNAUTHORIZED:
            hint = f". {LOGIN_HINT}"
        return TrackingError(f"could not {what}: MLflow at {place} refused it ({told}){hint}")


class UnreachableError(TrackingError):
    """MLflow is away; the same call may work later."""


def is_passing(error: Exception) -> bool:
    """Whether the same call may work in a moment."""
    if isinstance(error, MlflowException):
        return error.error_code in _PASSING_CODES or (
            error.error_code == "INTERNAL_ERROR"
            and (isinstance(error, RestException) or bool(_PASSING_TEXT.search(str(error))))
        )
    if isinstance(error, requests.HTTPError):  # of an artifact; MLflow makes no exception of its own of it
        status = _status(error)
        return status is None or status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _PASSING_STATUSES
    return isinstance(error, requests.RequestException) or getattr(error, "errno", None) in _PASSING_ERRNOS


def _status(error: Exception) -> int | None:
    """HTTP status of an answer; None where there was none."""
    if isinstance(error, MlflowException):
        return int(error.get_http_status_code())
    return error.response.status_code if isinstance(error, requests.HTTPError) and error.response is not None else None


class _HasConnection(Protocol):
    _connection: Connection


S = TypeVar("S", bound=_HasConnection)


def timed(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Count the time spent in a public method as time that its caller was held up."""

    @functools.wraps(method)
    def wrapper(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._connection.callers.running():
            return method(self, *args, **kwargs)

    return wrapper


def _sqlite_path(uri: str) -> Path | None:
    if not uri.startswith("sqlite:///"):
        return None
    return Path(uri.removeprefix("sqlite:///").split("?")[0])


def _use_write_ahead_log(database: Path) -> None:
    """Let readers and one writer work side by side. The mode stays with the file, so one connection sets it for all."""
    database.parent.mkdir(parents=True, exist_ok=True)
    try:
        with closing(sqlite3.connect(database, timeout=30)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
    except sqlite3.Error as error:
        raise TrackingError(
            f"{database}: got {error}, expected an SQLite file of MLflow. Move it away or set MLFLOW_TRACKING_URI."
        ) from error


def _workspace_id(file: Path) -> str:
    """The id of this ALTO home. Task ids are unique in a home only, and homes may share one MLflow server."""
    if not file.exists():
        file.write_text(secrets.token_hex(6), encoding="ascii")
    return file.read_text(encoding="ascii").strip()
