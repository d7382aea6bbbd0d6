"""The agent of a host: signs of life, dead and stubborn runs of this machine, and a scheduler that waits.

Prefect's worker starts the runs; the agent looks after them. It needs no answer from Prefect to free a GPU.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence

from alto_core.cluster.processes import is_gone
from alto_core.cluster.recovery import recover
from alto_core.errors import AltoError
from alto_core.queue_states import QueueState, StopRequest
from alto_core.settings import Settings
from alto_core.store import Fleet, Queue, QueueEntry
from flows.deployments import pool_name
from flows.schedule import schedule_here

BEATS_PER_LEASE = 6
WATCH_SECONDS = 1.0
"""Between two looks at the runs."""
KILL_AFTER_SECONDS = 6.0
"""A run that was asked to stop and has not by then is killed; its newest checkpoints stay."""
REJOIN_SECONDS = 3.0
"""For runs on a host that was lost to notice that they were given up."""
PLAN_INTERVAL_SECONDS = 30.0
"""Between two looks of the scheduler when nothing happens."""

logger = logging.getLogger(__name__)


class HostAgent:
    """Looks after one host.

    Args:
        settings: the store.
        host_id: the name of the host.
        gpus: indices of the GPUs that the cluster may use.
        gpu_bytes: memory of each.
    """

    def __init__(self, settings: Settings, *, host_id: str, gpus: Sequence[int], gpu_bytes: int):
        self._settings, self._host_id, self._gpus, self._gpu_bytes = settings, host_id, tuple(gpus), gpu_bytes
        self._queue, self._fleet = Queue(settings), Fleet(settings)
        self._beaten = self._planned = 0.0
        self._version = -1
        self._leaving = False
        self._asked: dict[tuple[str, int], float] = {}

    def join(self) -> None:
        """Add the host and its GPUs to the cluster."""
        self._fleet.join(self._host_id, gpus=self._gpus, gpu_bytes=self._gpu_bytes, work_pool=pool_name(self._host_id))
        self._beaten = time.monotonic()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Give signs of life and watch the runs in a thread of its own, which no busy server of Prefect can hold up."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(WATCH_SECONDS):
                try:
                    self._beat()
                    self._kill_stubborn()
                    recover(self._settings, is_gone=self._is_gone)
                except AltoError as error:
                    logger.warning("%s", error)  # a store that is away comes back, or the leases run out

        thread = threading.Thread(target=watch, name="alto-host", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def plan(self) -> None:
        """Plan and dispatch if something has happened that makes another plan better, or a while has passed."""
        try:
            self._plan_if_due()
        except AltoError as error:
            logger.warning("not planned: %s", error)
            self._planned = time.monotonic()

    def _plan_if_due(self) -> None:
        version = self._queue.version()
        if version == self._version and time.monotonic() - self._planned < PLAN_INTERVAL_SECONDS:
            return
        # read before planning: what happens meanwhile is planned for in the next round
        reason = "interval" if version == self._version else self._latest_event()
        self._version = version
        schedule_here(reason)
        self._planned = time.monotonic()

    def leave(self, patience_seconds: float = 20.0) -> None:
        """Take the host out of the cluster: its tasks stop at their checkpoints and go back into the queue."""
        self._leaving = True
        self._fleet.leave(self._host_id)
        deadline = time.monotonic() + patience_seconds
        while mine := self._mine():
            for entry in mine:
                if entry.stop is None:
                    self._queue.request_stop(entry.task_id, StopRequest.PREEMPT)
            if time.monotonic() > deadline:
                logger.warning("%d runs on %s have not stopped", len(mine), self._host_id)
                break
            time.sleep(0.5)

    def _beat(self) -> None:
        if time.monotonic() - self._beaten < self._settings.lease_seconds / BEATS_PER_LEASE:
            return
        if not self._fleet.beat(self._host_id) and not self._leaving:
            logger.warning("%s was taken for lost; it joins again", self._host_id)
            time.sleep(REJOIN_SECONDS)
            self.join()
        self._beaten = time.monotonic()

    def _latest_event(self) -> str:
        events = self._queue.events(after_id=self._version - 1) if self._version > 0 else ()
        return f"{events[-1].kind} {events[-1].task_id or events[-1].host_id or ''}".strip() if events else "start"

    def _mine(self) -> list[QueueEntry]:
        entries = self._queue.entries(QueueState.CLAIMED, QueueState.RUNNING)
        return [entry for entry in entries if entry.host_id == self._host_id]

    def _kill_stubborn(self) -> None:
        now = time.monotonic()
        asked = {(e.task_id, e.attempt): e for e in self._mine() if e.stop is not None and e.process_id is not None}
        self._asked = {key: self._asked.get(key, now) for key in asked}
        for key, since in self._asked.items():
            process_id = asked[key].process_id
            if now - since > KILL_AFTER_SECONDS and process_id is not None:
                logger.warning("task %s does not stop: its process is killed", key[0])
                _kill(process_id)

    def _is_gone(self, entry: QueueEntry) -> bool:
        return entry.host_id == self._host_id and entry.process_id is not None and is_gone(entry.process_id)


def _kill(process_id: int) -> None:
    """The process and, when it leads a group, everything in it."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(process_id) == process_id:
            os.killpg(process_id, signal.SIGKILL)
        else:
            os.kill(process_id, signal.SIGKILL)
