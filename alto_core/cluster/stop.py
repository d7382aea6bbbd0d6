"""Whether a task of the queue was asked to stop."""

from __future__ import annotations

import time

from alto_core.errors import StoreError
from alto_core.interruption import StopQuestion, never
from alto_core.queue_states import QueueState, StopRequest
from alto_core.settings import Settings
from alto_core.store import Queue

LOOK_SECONDS = 1.0
"""Between two looks into the store."""


def asked_to_stop(task_id: str, settings: Settings) -> StopQuestion:
    """A question that looks into the queue once a second; for a task that was never submitted it is always None."""
    queue = Queue(settings)
    if not _runs_queued(task_id, queue):
        queue.close()
        return never
    looked = 0.0

    def ask() -> StopRequest | None:
        nonlocal looked
        if time.monotonic() - looked < LOOK_SECONDS:
            return None
        looked = time.monotonic()
        return queue.entry(task_id).stop

    return ask


def _runs_queued(task_id: str, queue: Queue) -> bool:
    try:
        return queue.entry(task_id).state is QueueState.RUNNING
    except StoreError:
        return False
