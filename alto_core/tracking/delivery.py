"""Carries what waits in a spool to MLflow: run by run in order, in calls as large as MLflow takes them.

No thread here: the one beside a training is `sender`'s, and what a task left behind is served by `left_behind`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mlflow.entities import Metric, RunTag

from alto_core.errors import TrackingError
from alto_core.tracking import adapters
from alto_core.tracking.connection import Connection, UnreachableError
from alto_core.tracking.messages import Message, Status, Tags, Upload
from alto_core.tracking.spool import Spool

MAX_POINTS_PER_CALL = 1000
"""MLflow's limit; its client cuts larger calls."""
MAX_BYTES_AHEAD = 2 * 2**20
"""Of lines read and not yet sent: bounds the memory after a long outage."""


class Waiting(NamedTuple):
    """A message that MLflow does not have yet."""

    start: int
    """Where it stands in the spool."""
    message: Message


class Delivery:
    """What waits in one task's spool. One thread of one process at a time delivers a spool; see `Spool.lock`.

    Args:
        connection: the way to MLflow.
        spool: the task's spool.
        task_folder: where relative paths of uploads begin.
    """

    def __init__(self, connection: Connection, spool: Spool, task_folder: Path):
        self._connection, self._spool, self._task_folder = connection, spool, task_folder
        self._position = self._noted = spool.cursor
        self._waiting: dict[str, deque[Waiting]] = {}
        self._without_files: set[str] = set()

    @property
    def delivered(self) -> int:
        """MLflow has every line that ends at or before this offset."""
        return min((lines[0].start for lines in self._waiting.values()), default=self._position)

    def is_delivered(self, run_id: str, end: int) -> bool:
        """Whether MLflow has all that was spooled for a run before this offset."""
        waiting = self._waiting.get(run_id)
        return self._position >= end and (waiting is None or waiting[0].start >= end)

    @property
    def position(self) -> int:
        """Every line that ends at or before this offset was taken in."""
        return self._position

    def holds(self, run_ids: Collection[str] | None = None) -> bool:
        """Whether something was taken in that is not sent: of any of these runs, or at all."""
        return bool(self._waiting) if run_ids is None else not self._waiting.keys().isdisjoint(run_ids)

    def read_ahead(self) -> None:
        """Take in what was spooled since the last call, up to `MAX_BYTES_AHEAD`."""
        limit = self.delivered + MAX_BYTES_AHEAD
        self._spool.sync()
        for line in self._spool.lines(self._position):
            if self._waiting and line.start > limit:
                break
            if line.message is not None:
                self._waiting.setdefault(line.message.run_id, deque()).append(Waiting(line.start, line.message))
            self._position = line.end

    def send(self, first: Collection[str] = ()) -> str:
        """Make one call for one of the runs that something waits for, if possible one of `first`.

        Returns:
            The run.

        Raises:
            UnreachableError: MLflow is away; everything still waits.
            TrackingError: MLflow refused it and would again; it is passed over.
        """
        run_id = next((run_id for run_id in first if run_id in self._waiting), None) or next(iter(self._waiting))
        lines = self._waiting[run_id]
        count = _sent_together(lines)
        try:
            self._call(run_id, [lines[i].message for i in range(count)])
        except UnreachableError:
            raise
        except Exception as error:
            self._drop(run_id, count)
            if isinstance(error, TrackingError):
                raise
            # a fault of ours; the side thread keeps it for whoever waits at the end
            raise TrackingError(f"could not log to run {run_id}: {type(error).__name__}: {error}") from error
        self._drop(run_id, count)
        return run_id

    def note(self) -> None:
        """Write down how far MLflow has everything; a disk that takes nothing is tried again next time."""
        if self.delivered != self._noted:
            with suppress(OSError):
                self._spool.set_cursor(self.delivered)
                self._noted = self.delivered

    def _drop(self, run_id: str, count: int) -> None:
        lines = self._waiting[run_id]
        for _ in range(count):
            lines.popleft()
        if not lines:
            del self._waiting[run_id]

    def _call(self, run_id: str, messages: Sequence[Message]) -> None:
        first = messages[0]
        if isinstance(first, Upload):
            self._without_files.add(run_id)
            self._upload(first)
            self._without_files.discard(run_id)
        elif isinstance(first, Status):
            self._set_status(first)
        else:
            points, tags = _merged(messages)
            log_batch = self._connection.client.log_batch
            self._connection.attempt(f"log to run {run_id}", log_batch, run_id, metrics=points, tags=tags)

    def _upload(self, upload: Upload) -> None:
        path = self._task_folder / upload.path
        if path.is_dir():
            adapters.upload_adapter(self._connection, upload.run_id, path)
        else:
            log_artifact = self._connection.client.log_artifact
            self._connection.attempt(f"log {path.name}", log_artifact, upload.run_id, str(path), upload.folder)

    def _set_status(self, wanted: Status) -> None:
        client, run_id = self._connection.client, wanted.run_id
        # a run whose files did not arrive must not look complete
        status = "FAILED" if wanted.status == "FINISHED" and run_id in self._without_files else wanted.status
        what = f"set the state of run {run_id}"
        if wanted.end_time is None:
            self._connection.attempt(what, client.update_run, run_id, status=status)
        else:
            self._connection.attempt(what, client.set_terminated, run_id, status, end_time=wanted.end_time)


def _sent_together(lines: deque[Waiting]) -> int:
    """How many of the first lines go in one call: points and tags until the limit, a state or a file alone."""
    count = num_points = 0
    for line in lines:
        if isinstance(line.message, Status | Upload):
            return count or 1
        num_points += 0 if isinstance(line.message, Tags) else line.message.num_points
        if count and num_points > MAX_POINTS_PER_CALL:
            return count
        count += 1
    return count


def _merged(messages: Sequence[Message]) -> tuple[list[Metric], list[RunTag]]:
    points: list[Metric] = []
    tags: dict[str, str] = {}
    for message in messages:
        if isinstance(message, Tags):
            tags.update(message.tags)
        elif not isinstance(message, Status | Upload):
            points += message.metrics()
    return points, [RunTag(key, value) for key, value in tags.items()]
