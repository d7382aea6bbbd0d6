"""A run's hold on its GPUs: begun once, kept alive by signs of life, given back however the run ends.

The store decides who acts for a task. A run whose attempt was given up, or that could not say for the time of a lease
that it lives, ends its process at once, because others may have its GPUs and its task by then.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from alto_core.cluster.processes import is_gone
from alto_core.cluster.recovery import MAX_FAILURES
from alto_core.cluster.stop import LOOK_SECONDS
from alto_core.domain import TaskState
from alto_core.errors import RankLostError, StoreError
from alto_core.interruption import RunDied, TaskStopped
from alto_core.queue_states import QueueState, StopRequest
from alto_core.settings import Settings
from alto_core.store import Queue, QueueEntry, Store
from alto_core.store.queue import AFTER_STOP

BEATS_PER_LEASE = 12
STOP_GRACE_SECONDS = 2.0
"""For training to end a step and save; after that the run is interrupted wherever it is."""
EXIT_PATIENCE_SECONDS = 60.0
"""For the process that used a GPU before to end."""
GIVEN_UP_EXIT_CODE = 75

logger = logging.getLogger(__name__)


@contextmanager
def held_gpus(
    task_id: str, attempt: int, settings: Settings, environ: Mapping[str, str] | None = None
) -> Iterator[QueueEntry]:
    """Hold the GPUs of a claim while the block runs. Main thread only, for its signal handler.

    Raises:
        StoreError: the claim was given up or its run has begun before, this process sees other GPUs than claimed, or a
            process that used them before does not exit.
        TaskStopped: the task was asked to stop, or the process by SIGTERM, which makes room like a preemption.
    """
    queue = Queue(settings)
    if queue.entry(task_id).state is QueueState.CLAIMED:
        _wait_for_exits(task_id, queue)
    entry = queue.begin(task_id, attempt, os.getpid())
    state, reason, died = QueueState.ENDED, "the run ended", False
    keeper = _Keeper(entry, settings)
    try:
        _check_visible_gpus(entry, os.environ if environ is None else environ)
        with keeper.interrupting():
            keeper.start()
            yield entry
    except TaskStopped as stopped:
        state, reason, died = AFTER_STOP[stopped.stop], str(stopped), isinstance(stopped, RunDied)
        raise
    finally:
        keeper.stop()
        state, reason = _settled(entry, state, reason, queue, settings)
        queue.release(task_id, attempt, state, reason, died=died)
        queue.close()


@contextmanager
def outliving_ranks(entry: QueueEntry | None) -> Iterator[None]:
    """A run that loses one of its ranks inside the block has died: its task waits for GPUs again, to go on.

    Args:
        entry: the run's; None: it is not the cluster's, and the error is told to whoever started it.

    Raises:
        RunDied: in place of the error, unless the task's runs have died too often.
    """
    try:
        yield
    except RankLostError as error:
        if entry is None or entry.num_failures + 1 >= MAX_FAILURES:
            raise
        raise RunDied(str(error)) from error


def _wait_for_exits(task_id: str, queue: Queue) -> None:
    """A run gives its GPUs back before its process ends; until then their memory is not free."""
    deadline = time.monotonic() + EXIT_PATIENCE_SECONDS
    while left := [one for one in queue.last_processes(task_id) if one != os.getpid() and not is_gone(one)]:
        if time.monotonic() > deadline:
            raise StoreError(
                f"task {task_id}: process {left[0]} used a GPU of this run before and has not exited for "
                f"{EXIT_PATIENCE_SECONDS:.0f} s, expected it to be gone. End it by hand."
            )
        time.sleep(0.2)


def _check_visible_gpus(entry: QueueEntry, environ: Mapping[str, str]) -> None:
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    expected = ",".join(map(str, entry.gpus))
    if visible != expected:
        raise StoreError(
            f"task {entry.task_id}: got CUDA_VISIBLE_DEVICES={visible!r}, expected {expected!r}, the GPUs claimed on "
            f"{entry.host_id}. Start it through the scheduler."
        )


def _settled(
    entry: QueueEntry, state: QueueState, reason: str, queue: Queue, settings: Settings
) -> tuple[QueueState, str]:
    """What the queue shall say after a run and why, and the task's own record made to agree.

    A task that came to its end has ended, even if the request to stop came in its last second. A run that was
    interrupted before its stages, or while it wrote down its end, must not leave its task open; unless the task is
    another attempt's by now.
    """
    store = Store(settings)
    try:
        task_state = store.task(entry.task_id).state
        if task_state.is_end:
            return QueueState.ENDED, str(task_state)
        if state is QueueState.ENDED and queue.entry(entry.task_id).attempt == entry.attempt:
            store.end_task(entry.task_id, TaskState.CANCELLED, "the run ended before its end was recorded")
        return state, reason
    finally:
        store.close()


class _Keeper(threading.Thread):
    """Says that the run lives, and sees when it is to stop or has been given up.

    What it does to the main thread, it does under a lock that the main thread takes to leave the block: an interrupt
    that came later would meet the handler of before, by default the end of the process. The handler itself runs in the
    main thread, maybe while that holds the lock, and takes none.
    """

    def __init__(self, entry: QueueEntry, settings: Settings):
        super().__init__(name="alto-lease", daemon=True)
        self._entry, self._settings = entry, settings
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._closing = False
        self._stop_request: StopRequest | None = None
        self._was_swallowed = False

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Inside the block a request to stop raises `TaskStopped` in the main thread when its grace is over.

        So does SIGTERM, at once: the machine wants the process gone, and the task goes on in another one. Where Python
        swallows what is raised, in the clean-up of an object, the keeper interrupts again.
        """
        report = sys.unraisablehook

        def interrupt(number: int, frame: FrameType | None) -> None:
            stop = self._stop_request or (StopRequest.PREEMPT if number == signal.SIGTERM else None)
            if not self._closing and stop is not None:
                self._closing = True
                raise TaskStopped(stop)

        def notice(swallowed: sys.UnraisableHookArgs) -> None:
            if isinstance(swallowed.exc_value, TaskStopped):
                self._stop_request, self._was_swallowed = swallowed.exc_value.stop, True
                self._closing = False
            else:
                report(swallowed)

        before = {number: signal.signal(number, interrupt) for number in (signal.SIGUSR1, signal.SIGTERM)}
        sys.unraisablehook = notice
        try:
            yield
        finally:
            self._closing = True
            sys.unraisablehook = report
            with self._lock:
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # drops one that is on its way
                for number, handler in before.items():
                    signal.signal(number, handler)

    def stop(self) -> None:
        """Return when the thread has ended. From then on nothing ends this process."""
        self._closing = True
        with self._lock:
            self._done.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        queue = Queue(self._settings)
        heard = beaten = time.monotonic()
        asked: float | None = None
        while not self._done.wait(LOOK_SECONDS):
            now = time.monotonic()
            try:
                current = queue.entry(self._entry.task_id)
                if current.attempt != self._entry.attempt or current.state is not QueueState.RUNNING:
                    self._give_up(f"it is {current.state} in attempt {current.attempt}")
                if now - beaten >= self._settings.lease_seconds / BEATS_PER_LEASE:
                    queue.beat(self._entry.task_id, self._entry.attempt)
                    beaten = now
                heard = now
            except StoreError as error:
                logger.warning("the store does not answer: %s", error)
                if now - heard > self._settings.lease_seconds:
                    self._give_up(f"no sign of life could be given for {now - heard:.0f} s")
                continue
            if current.stop is not None:
                self._stop_request = current.stop
                asked = asked or now
            if self._was_swallowed or (asked is not None and now - asked >= STOP_GRACE_SECONDS):
                self._interrupt()
        queue.close()

    def _interrupt(self) -> None:
        with self._lock:
            if not self._closing:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def _give_up(self, why: str) -> None:
        """No cleaning up: what this process would write is another run's by now."""
        with self._lock:
            if not self._done.is_set():
                logger.error("task %s, attempt %s ends here: %s", self._entry.task_id, self._entry.attempt, why)
                os._exit(GIVEN_UP_EXIT_CODE)
