"""The side thread that delivers a task's spool while the task trains, so that training does not wait for MLflow.

What is spooled goes out together after `MAX_WAITING_SECONDS`, and at once where somebody waits for it. While MLflow is
away the thread tries again and again; what waits is in the spool and not here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from filelock import FileLock, Timeout

from alto_core.errors import TrackingError
from alto_core.tracking.connection import Connection, UnreachableError
from alto_core.tracking.delivery import Delivery
from alto_core.tracking.spool import Spool

MAX_WAITING_SECONDS = 10.0
"""Between a point and its sending. Longer makes fewer calls, and charts that lag behind."""
MAX_WAITING_BYTES = 2**20
"""Of the spool; above it sending begins earlier."""
MAX_NOTE_SECONDS = 2.0
"""Between two notes of how far MLflow has everything."""
FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 5.0
"""Between two tries while MLflow is away."""


class Sender:
    """Delivers one spool, from a thread that lives while something waits.

    Args:
        connection: the way to MLflow.
        spool: the task's spool.
        task_folder: where relative paths of uploads begin.
        on_delivered: called in the thread with the runs that MLflow has got something for.
    """

    def __init__(
        self,
        connection: Connection,
        spool: Spool,
        task_folder: Path,
        on_delivered: Callable[[Collection[str]], None],
    ):
        self._connection, self._spool, self._task_folder = connection, spool, task_folder
        self._on_delivered = on_delivered
        self._changed = threading.Condition()
        self._wanted: dict[str, int] = {}
        """Runs that somebody waits for, and up to which offset."""
        self._wanted_end = 0
        """Somebody waits for every run, up to this offset."""
        self._waiting_since: float | None = None
        self._bytes_waiting = 0
        self._done = spool.cursor
        self._away: UnreachableError | None = None
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._refused: list[TrackingError] = []
        self._untold: set[str] = set()
        """Runs of which MLflow has something that nobody was told about."""
        self._is_slow = False
        self._next_note = 0.0
        self._is_stopping = False
        self._thread: threading.Thread | None = None

    @property
    def is_away(self) -> bool:
        """Whether the last try found no MLflow."""
        return self._away is not None

    def wake(self, num_bytes: int) -> None:
        """Say that so much was spooled."""
        with self._changed:
            self._bytes_waiting += num_bytes
            if self._waiting_since is None:
                self._waiting_since = time.monotonic()
            self._start()
            if self._bytes_waiting >= MAX_WAITING_BYTES:
                self._changed.notify_all()

    def hurry(self, run_ids: Collection[str], seconds: float) -> bool:
        """Deliver these runs before others; whether MLflow has them now.

        An MLflow that is away, or kept somebody waiting and has taken nothing since, is not waited for.
        """
        deadline, end = time.monotonic() + seconds, self._spool.end
        with self._changed:
            self._wanted |= dict.fromkeys(run_ids, end)
            self._start()
            self._changed.notify_all()
            while not (is_done := self._wanted.keys().isdisjoint(run_ids)):
                left = deadline - time.monotonic()
                self._is_slow = self._is_slow or left <= 0
                if self._away or self._is_slow:
                    break
                self._changed.wait(left)
            for run_id in run_ids:
                self._wanted.pop(run_id, None)
        return is_done

    def flush(self, seconds: float) -> None:
        """Return when MLflow has everything.

        Args:
            seconds: how long an MLflow is waited for that takes nothing.

        Raises:
            TrackingError: MLflow refused something; it is passed over, and told once.
            UnreachableError: MLflow stayed away; what waits is in the spool.
        """
        end, since = self._spool.end, time.monotonic()
        with self._changed:
            self._wanted_end = max(end, self._wanted_end)
            before = self._done
            while self._done < end and time.monotonic() < since + seconds:
                self._start()
                self._changed.notify_all()
                self._changed.wait(1.0)
                if self._done > before:
                    before, since = self._done, time.monotonic()
            self._wanted_end = min(self._done, self._wanted_end)
            is_done, away = self._done >= end and not self._spool.has_unwritten, self._away
            refused, self._refused = self._refused, []
        if refused:
            others = f" (and {len(refused) - 1} more refused)" if len(refused) > 1 else ""
            raise TrackingError(f"{refused[0]}{others}") from refused[0]
        if not is_done:
            reason = str(away) if away else f"MLflow took nothing for {seconds:g} s."
            raise UnreachableError(f"{reason} {self._describe_waiting()}") from away

    def stop(self) -> None:
        """End the thread after the call that it is in. What waits stays in the spool."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._is_stopping = False

    def _describe_waiting(self) -> str:
        kib = (self._spool.end - self._done) / 1024
        return (
            f"What was logged waits in {self._spool.folder} ({kib:.0f} KiB) and is delivered when the task goes on, or "
            "by `alto reconcile`."
        )

    def _start(self) -> None:
        if self._thread is None:
            # a daemon: a trainer that dies of something else must not hang on an MLflow that is away
            self._thread = threading.Thread(target=self._run, name="alto-tracking", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        lock = self._spool.lock()
        while not _acquired(lock):  # another process delivers
            with self._changed:
                self._note_progress(self._spool.cursor)
                if self._is_stopping:
                    self._thread = None
                    return
        try:
            delivery = Delivery(self._connection, self._spool, self._task_folder)
            while self._wait_for_work():
                with self._connection.background.running():
                    self._work(delivery)
        finally:
            lock.release()

    def _wait_for_work(self) -> bool:
        """Whether there is something to send now; else the thread is over."""
        with self._changed:
            while not self._is_stopping:
                seconds = self._seconds_until_due()
                if seconds == 0.0 or self._wanted:
                    return True
                if seconds is None:
                    break
                self._changed.wait(seconds)
            self._thread = None
            return False

    def _seconds_until_due(self) -> float | None:
        """Until everything is to be sent; None when nothing waits."""
        if self._done < self._wanted_end or self._bytes_waiting >= MAX_WAITING_BYTES:
            return 0.0
        if self._waiting_since is None:
            return None
        return max(0.0, self._waiting_since + MAX_WAITING_SECONDS - time.monotonic())

    def _work(self, delivery: Delivery) -> None:
        """Send what was spooled so far if that is due, else what somebody waits for."""
        with self._changed:
            is_due = self._seconds_until_due() == 0.0
            if is_due:
                self._waiting_since = None
        try:
            delivery.read_ahead()
            while not self._is_stopping and ((wanted := self._unmet(delivery)) or is_due):
                if wanted and not delivery.holds(wanted):
                    delivery.read_ahead()
                if not delivery.holds():
                    break
                self._send(delivery, wanted)
                if time.monotonic() >= self._next_note:
                    self._note(delivery)
            self._note(delivery)
        except (UnreachableError, OSError) as error:
            delivery.note()
            self._pause(error)
        with self._changed:
            self._bytes_waiting = self._spool.end - delivery.position
            if self._bytes_waiting and self._waiting_since is None:
                self._waiting_since = time.monotonic()

    def _note(self, delivery: Delivery) -> None:
        """So that a killed process sends little twice, and curves are known to be in MLflow, while points pour in."""
        delivery.note()
        self._read_back(self._untold)
        self._next_note = time.monotonic() + MAX_NOTE_SECONDS

    def _send(self, delivery: Delivery, wanted: Collection[str]) -> None:
        try:
            self._untold.add(delivery.send(wanted))
        except UnreachableError:
            raise
        except TrackingError as error:
            self._refused.append(error)
        with self._changed:
            self._away, self._is_slow, self._pause_seconds = None, False, FIRST_PAUSE_SECONDS
            self._note_progress(delivery.delivered)

    def _unmet(self, delivery: Delivery) -> list[str]:
        """The runs that somebody still waits for; who waits for others is told."""
        with self._changed:
            met = [run_id for run_id, end in self._wanted.items() if delivery.is_delivered(run_id, end)]
        self._read_back(self._untold.intersection(met))
        with self._changed:
            for run_id in met:
                self._wanted.pop(run_id, None)
            self._note_progress(delivery.delivered)
            return list(self._wanted)

    def _read_back(self, run_ids: Collection[str]) -> None:
        if run_ids:
            self._on_delivered(tuple(run_ids))
            self._untold.difference_update(tuple(run_ids))

    def _note_progress(self, offset: int) -> None:
        self._done = offset
        self._changed.notify_all()

    def _pause(self, error: UnreachableError | OSError) -> None:
        """MLflow is away: nobody waits for it now, and each try comes later than the one before."""
        with self._changed:
            self._away = error if isinstance(error, UnreachableError) else UnreachableError(f"could not log: {error}")
            self._waiting_since = self._waiting_since or time.monotonic() - MAX_WAITING_SECONDS
            self._changed.notify_all()
            deadline = time.monotonic() + self._pause_seconds
            while not self._is_stopping and time.monotonic() < deadline:
                self._changed.wait(deadline - time.monotonic())
        self._pause_seconds = min(2 * self._pause_seconds, MAX_PAUSE_SECONDS)


def _acquired(lock: FileLock) -> bool:
    try:
        lock.acquire(timeout=0.2)
    except Timeout:
        return False
    return True
