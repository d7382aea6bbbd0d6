"""States of jobs and cuts, written in the background while training goes on.

Training waits for the copy to host memory alone. A side thread writes in order: states first, then the cut that names
them, so that a cut never names what is not on disk.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from alto_core.cuts import Cut, CutLog
from alto_core.device import host_bytes
from alto_core.engine.checkpoint import JobSnapshot, write_snapshot
from alto_core.engine.state_folders import fault_of_state, prune

MAX_HELD_SHARE = 0.01
"""Share of the time that steps may be held up by cuts; where copying takes longer, they come less often."""
logger = logging.getLogger(__name__)


@functools.cache
def max_waiting_bytes() -> int:
    """Host memory of states of leaving jobs that wait to be written: an eighth, and 1 to 8 GiB. Beyond, jobs wait."""
    return min(max(host_bytes() // 8, 2**30), 2**33)


@dataclass(frozen=True, kw_only=True)
class _State:
    """A state that waits to be written."""

    folder: Path
    snapshot: JobSnapshot


class Checkpointer:
    """Writes states, and cuts where there is a log for them. One thread trains and calls, another writes.

    Args:
        log: where cuts go; None: states of leaving jobs are written, and no cuts.
        begun: the cut that training goes on from; its states are kept until there are newer ones.
        interval_seconds: between two cuts: about what a killed run loses at most.
    """

    def __init__(self, log: CutLog | None = None, *, begun: Cut | None = None, interval_seconds: float = math.inf):
        self._log, self._interval = log, interval_seconds
        self._steps_before: Mapping[str, int] = {}
        self._steps: Mapping[str, int] = begun.steps if begun else {}
        self._folders: dict[str, Path] = {}
        self._changed = threading.Condition()
        self._waiting: deque[_State | Cut] = deque()
        self._in_flight: _State | Cut | None = None
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._last_cut = time.monotonic()
        self.held_seconds = 0.0
        """Wall time that training waited for checkpoints so far."""
        self.written_bytes = 0

    @contextmanager
    def writing(self) -> Iterator[None]:
        """When the block ends everything is on disk, or has failed: raised, unless the block itself raised."""
        try:
            yield
        except BaseException:
            self._drain()
            if self._failure is not None:
                logger.warning("%s", self._failure)
            raise
        self.finish()

    def is_due(self) -> bool:
        """Whether it is time for a cut: the interval has passed and no other is being written."""
        if self._log is None or time.monotonic() - self._last_cut < self._interval:
            return False
        with self._changed:
            return self._is_idle()

    def check(self) -> None:
        """Raise what went wrong in the background.

        Raises:
            EngineError: a state could not be written.
        """
        with self._changed:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def save(self, folder: Path, take: Callable[[], JobSnapshot]) -> None:
        """Write the state of a job that leaves its slot, soon.

        Args:
            folder: the job's states.
            take: copies the state; called at once.
        """
        with self._holding(), self._changed:
            self._changed.wait_for(lambda: self._waiting_bytes() < max_waiting_bytes())
            self._put(_State(folder=folder, snapshot=take()))

    def cut(self, cut: Cut, states: Mapping[Path, Callable[[], JobSnapshot]]) -> None:
        """Write states of jobs in slots, then the cut that names them, soon.

        Args:
            cut: where all jobs stand.
            states: by folder of the job's states, what copies one; called at once.
        """
        if self._log is None:
            return
        started = time.monotonic()
        with self._holding(), self._changed:
            for folder, take in states.items():
                self._put(_State(folder=folder, snapshot=take()))
            self._put(cut)
        self._last_cut = time.monotonic()
        self._interval = max(self._interval, (self._last_cut - started) / MAX_HELD_SHARE)

    def wait_for(self, folder: Path) -> None:
        """Return when no state of this folder is on the way to the disk."""

        def is_on_the_way() -> bool:
            return any(isinstance(item, _State) and item.folder == folder for item in (*self._waiting, self._in_flight))

        with self._holding(), self._changed:
            self._changed.wait_for(lambda: not is_on_the_way())

    def finish(self) -> None:
        """Return when everything is on disk.

        Raises:
            EngineError: something could not be written.
        """
        with self._holding():
            self._drain()
        self.check()

    def _drain(self) -> None:
        with self._changed:
            self._changed.wait_for(self._is_idle)

    def _is_idle(self) -> bool:
        return not self._waiting and self._in_flight is None

    @contextmanager
    def _holding(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.held_seconds += time.monotonic() - started

    def _waiting_bytes(self) -> int:
        return sum(item.snapshot.num_bytes for item in self._waiting if isinstance(item, _State))

    def _put(self, item: _State | Cut) -> None:
        self._waiting.append(item)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_while_waiting, name="alto-checkpoints", daemon=True)
            self._thread.start()

    def _write_while_waiting(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    return
                item = self._in_flight = self._waiting.popleft()
            failure = None
            try:
                self._write(item)
            except Exception as error:  # raised again in the training thread, by `check`
                failure = error
            with self._changed:
                self._in_flight = None
                if failure is not None:
                    self._failure = self._failure or failure
                    self._waiting.clear()  # a cut among it may name the state that is missing now
                self._changed.notify_all()

    def _write(self, item: _State | Cut) -> None:
        if isinstance(item, Cut):
            assert self._log is not None
            self._log.write(item)
            self._steps_before, self._steps = self._steps, item.steps
            for job_id, folder in self._folders.items():
                prune(folder, keep_from=self._keep_from(job_id))
            return
        job_id = item.snapshot.job.job_id
        self._folders[job_id] = item.folder
        if fault_of_state(item.folder, item.snapshot.step) is None:
            return  # a cut may name it: it must not be gone for a moment
        write_snapshot(item.snapshot, item.folder, keep_from=self._keep_from(job_id))
        self.written_bytes += item.snapshot.num_bytes

    def _keep_from(self, job_id: str) -> int | None:
        """The state that the cut before the newest names is kept too, in case one of the newest is damaged."""
        return self._steps_before.get(job_id, self._steps.get(job_id))
