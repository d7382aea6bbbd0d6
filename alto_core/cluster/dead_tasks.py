"""Finds tasks whose process died without a word where no queue looks after them, and writes down how they ended.

`alto tune` runs a task in its own process, and a process that is killed leaves its task running for ever in the store
and in MLflow. A task at work is held by a lock that the system takes back from the dead; that lock decides. What waits
or runs in the queue is looked after by `recovery`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime

from alto_core.cluster.recovery import START_PATIENCE, Finding
from alto_core.domain import TaskState
from alto_core.errors import TrackingError
from alto_core.settings import Settings
from alto_core.store import EventDraft, Queue, QueueEvent, Store, TaskRecord
from alto_core.task_lock import held_if_free, was_held_here

DIED = "its process died without a word"

logger = logging.getLogger(__name__)


def end_dead_tasks(settings: Settings, now: datetime | None = None) -> tuple[Finding, ...]:
    """End the tasks outside of the queue whose process is gone, in the store and in MLflow, with their open jobs.

    Safe to do from several places at once, and cheap where nothing died. Tasks of other machines are left to these.

    Args:
        settings: the store, and the folders of the tasks.
        now: the moment to judge from.
    """
    now = now or datetime.now(UTC)
    store, queue = Store(settings), Queue(settings)
    queued = {entry.task_id for entry in queue.entries()}
    findings = []
    for record in store.open_tasks():
        folder, signs = settings.task_folder(record.task_id), queue.events(task_id=record.task_id)
        if record.task_id in queued or not _is_begun(record, signs, now) or not was_held_here(folder):
            continue
        # what left the queue before it began was cancelled, by a command that died before it wrote that down
        was_cancelled = record.state is TaskState.QUEUED and bool(signs)
        state, why = (TaskState.CANCELLED, "cancelled") if was_cancelled else (TaskState.FAILED, DIED)
        with held_if_free(folder) as is_free:
            if is_free and _end(record, state, why, settings):
                text = f"task {record.task_id}: {why}; {state}"
                findings.append(Finding(text=text, task_id=record.task_id, flow_run_id=record.flow_run_id))
    store.close()
    queue.close()
    for finding in findings:
        logger.warning("%s", finding.text)
    return tuple(findings)


def _is_begun(record: TaskRecord, signs: Sequence[QueueEvent], now: datetime) -> bool:
    """Whether a process has begun with a task. One that was made or cancelled just now may still be in its hands."""
    if record.state is TaskState.RUNNING:
        return True
    return now - max([record.created_at, *(sign.at for sign in signs)]) > START_PATIENCE


def _end(record: TaskRecord, state: TaskState, why: str, settings: Settings) -> bool:
    # here, because they take torch and MLflow: a look that finds nothing dead does without
    from alto_core.lifecycle import end_task
    from alto_core.workspace import Workspace

    workspace = Workspace(record.task_id, settings)
    try:
        if workspace.store.task(record.task_id).state.is_end:
            return False  # it came to its end since
        if record.parent_run_id is None:  # it died before its runs were made
            workspace.store.append_events(record.task_id, [EventDraft(kind="error", text=why)])
            workspace.store.end_task(record.task_id, state, why)
        else:
            end_task(workspace, state, why)
    except TrackingError as error:
        logger.warning("task %s: %s, which could not be recorded yet: %s", record.task_id, why, error)
        return False
    finally:
        workspace.store.close()
    return True
