"""The side thread that carries metrics and tags to MLflow in batches, so that training does not wait for it.

Everything for one run that waits is sent in one call. While MLflow is away, what waits stays here and is tried again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from mlflow.entities import Metric, RunTag

from alto_core.errors import TrackingError
from alto_core.tracking.connection import Connection, UnreachableError

MAX_WAITING_METRICS = 250
"""Metrics of one run that may wait before they are sent: 50 steps with five metrics each."""

MAX_WAITING_SECONDS = 5.0


@dataclass
class _Batch:
    """What waits for one run."""

    metrics: list[Metric] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)


@dataclass
class _Waiting:
    """What waits to be sent: batches first, then the operations in their order."""

    batches: dict[str, _Batch] = field(default_factory=dict)
    operations: deque[tuple[str, Callable[[], object]]] = field(default_factory=deque)

    def __bool__(self) -> bool:
        return bool(self.batches or self.operations)


class Writer:
    """Sends in order, from a thread that lives while something waits."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._changed = threading.Condition()
        self._waiting = _Waiting()
        self._since = 0.0
        self._is_sending = False
        self._is_urgent = False
        self._failures: list[TrackingError] = []
        self._thread: threading.Thread | None = None

    def add(self, run_id: str, *, metrics: Sequence[Metric] = (), tags: Mapping[str, str] | None = None) -> None:
        """Send metrics and tags of one run soon."""
        with self._changed:
            self._begin()
            batch = self._waiting.batches.setdefault(run_id, _Batch())
            batch.metrics += metrics
            batch.tags.update(tags or {})
            if len(batch.metrics) >= MAX_WAITING_METRICS:
                self._is_urgent = True
                self._changed.notify_all()

    def add_operation(self, what: str, operation: Callable[[], object]) -> None:
        """Call after all that waits now. `what` completes "could not ..."; the operation must bear repetition."""
        with self._changed:
            self._begin()
            self._waiting.operations.append((what, operation))

    def flush(self) -> None:
        """Return when all that was added before can be read back.

        Raises:
            TrackingError: MLflow refused something (it is dropped), or stayed away (it stays here and is sent later).
        """
        with self._changed:
            # what an absent MLflow did not take is still waiting, and gets another try now
            self._failures = [failure for failure in self._failures if not isinstance(failure, UnreachableError)]
            while (self._waiting or self._is_sending) and not self._is_given_up():
                self._is_urgent = True
                self._changed.notify_all()
                self._changed.wait()
            failures, self._failures = self._failures, []
        if failures:
            others = f" (and {len(failures) - 1} more failed writes)" if len(failures) > 1 else ""
            raise type(failures[0])(f"{failures[0]}{others}") from failures[0]

    def _begin(self) -> None:
        if not self._waiting:
            self._since = time.monotonic()
        if self._thread is None:
            # a daemon: a trainer that dies of something else must not hang on an MLflow that is away
            self._thread = threading.Thread(target=self._send_while_waiting, name="alto-tracking", daemon=True)
            self._thread.start()

    def _is_given_up(self) -> bool:
        return any(isinstance(failure, UnreachableError) for failure in self._failures)

    def _send_while_waiting(self) -> None:
        while True:
            with self._changed:
                while self._waiting and not self._is_due():
                    self._changed.wait(self._seconds_to_wait())
                if not self._waiting:
                    self._thread = None
                    return
                taken, self._waiting = self._waiting, _Waiting()
                self._is_sending, self._is_urgent = True, False
            with self._connection.background.running():
                self._send(taken)
            with self._changed:
                self._put_back(taken)
                self._is_sending = False
                self._changed.notify_all()

    def _is_due(self) -> bool:
        return self._is_urgent or self._seconds_to_wait() == 0.0

    def _seconds_to_wait(self) -> float:
        return max(0.0, self._since + MAX_WAITING_SECONDS - time.monotonic())

    def _send(self, taken: _Waiting) -> None:
        """Send and remove one thing after the other; stop where MLflow stays away."""
        for run_id in list(taken.batches):
            if not self._try(f"log metrics of run {run_id}", partial(self._log_batch, run_id, taken.batches[run_id])):
                return
            del taken.batches[run_id]
        while taken.operations:
            what, operation = taken.operations[0]
            if not self._try(what, operation):
                return
            taken.operations.popleft()

    def _log_batch(self, run_id: str, batch: _Batch) -> None:
        tags = [RunTag(key, value) for key, value in batch.tags.items()]
        self._connection.client.log_batch(run_id, metrics=batch.metrics, tags=tags)

    def _try(self, what: str, operation: Callable[[], object]) -> bool:
        """Whether it is done with: sent, or refused for good."""
        try:
            self._connection.call(what, operation)
        except UnreachableError as error:
            self._failures.append(error)
            return False
        except TrackingError as error:
            self._failures.append(error)
        except Exception as error:  # a fault of ours; the next flush raises it, where it would be lost in this thread
            self._failures.append(TrackingError(f"could not {what}: {type(error).__name__}: {error}"))
        return True

    def _put_back(self, unsent: _Waiting) -> None:
        """What could not be sent goes before what came meanwhile."""
        if not unsent:
            return
        newer, self._waiting = self._waiting, unsent
        self._since = time.monotonic()
        for run_id, batch in newer.batches.items():
            older = self._waiting.batches.setdefault(run_id, _Batch())
            older.metrics += batch.metrics
            older.tags.update(batch.tags)
        self._waiting.operations += newer.operations
