"""Finds tasks whose process died without a word where no queue looks after them, and writes down how they ended.

`alto tune` runs a task in its own process, and a process that is killed leaves its task running for ever in the store
and in MLflow. A task at work is held by a lock that the system takes back from the dead; that lock decides. What waits
or runs in the queue is looked after by `recovery`.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from alto_core.cluster.recovery import START_PATIENCE, Finding
from alto_core.domain import TaskState
from alto_core.errors import TrackingError
from alto_core.settings import Settings
from alto_core.store import EventDraft, Queue, Store, TaskRecord
from alto_core.task_lock import held_if_free, was_held_here

DIED = "its process died without a word"

logger = logging.getLogger(__name__)


def end_dead_tasks(settings: Settings, now: datetime | None = None) -> tuple[Finding, ...]:
    """Fail the tasks outside of the queue whose process is gone, in the store and in MLflow, with their open jobs.

    Safe to do from several places at once, and cheap where nothing died. Tasks of other machines are left to these.

    Args:
        settings: the store, and the folders of the tasks.
        now: the moment to judge from.
    """
    now = now or datetime.now(UTC)
    store, queue = Store(settings), Queue(settings)
    queued = {entry.task_id for entry in queue.entries()}
    queue.close()
    findings = []
    for record in store.open_tasks():
        folder = settings.task_folder(record.task_id)
        # a task that has not begun is still being prepared, unless that takes for ever
        begun = record.state is TaskState.RUNNING or now - record.created_at > START_PATIENCE
        if record.task_id in queued or not begun or not folder.is_dir() or not was_held_here(folder):
            continue
        with held_if_free(folder) as is_free:
            if is_free and _end(record, settings):
                text = f"task {record.task_id}: {DIED}; failed"
                findings.append(Finding(text=text, task_id=record.task_id, flow_run_id=record.flow_run_id))
    store.close()
    for finding in findings:
        logger.warning("%s", finding.text)
    return tuple(findings)


def _end(record: TaskRecord, settings: Settings) -> bool:
    # here, because they take torch and MLflow: a look that finds nothing dead does without
    from alto_core.lifecycle import end_task
    from alto_core.workspace import Workspace

    workspace = Workspace(record.task_id, settings)
    try:
        if workspace.store.task(record.task_id).state.is_end:
            return False  # it came to its end since
        if record.parent_run_id is None:  # it died before its runs were made
            workspace.store.append_events(record.task_id, [EventDraft(kind="error", text=DIED)])
            workspace.store.end_task(record.task_id, TaskState.FAILED, DIED)
        else:
            end_task(workspace, TaskState.FAILED, DIED)
    except TrackingError as error:
        logger.warning("task %s: %s, which could not be recorded yet: %s", record.task_id, DIED, error)
        return False
    finally:
        workspace.store.close()
    return True
