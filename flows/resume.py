"""A task goes on after its run was killed, failed or was cancelled; from Python, and behind `alto resume`."""

from __future__ import annotations

# flows.tune prepares the environment that libraries read when they are imported, so it comes first
# isort: off
from flows.tune import TuneResult, run_task, tune_result
# isort: on

from alto_core.domain import TaskState
from alto_core.errors import StoreError
from alto_core.inputs import refuse_changes
from alto_core.preparation import finish_creation
from alto_core.queue_states import QueueState
from alto_core.registration import publish_report
from alto_core.settings import Settings
from alto_core.store import Queue
from alto_core.task_lock import held
from alto_core.workspace import Workspace


def resume(task_id: str, *, as_recorded: bool = False) -> TuneResult:
    """Let a task go on from its last checkpoint in this process; returns when it has ended.

    Rows, curves and verdicts are those of a run that was never interrupted; jobs that have finished stay as they are.

    Args:
        task_id: the task.
        as_recorded: do not look whether the task file and the files that it names still say what they said.

    Raises:
        StoreError: there is no such task, it has finished, another process is at work on it, or the cluster has it.
        TaskFileError: the task file, or a file that it names, has changed; names the field.
        AltoError: the task failed again.
        KeyboardInterrupt: it was interrupted again.
    """
    workspace = Workspace.open(task_id)
    record = workspace.store.task(task_id)
    _refuse_queued(task_id, workspace.settings)
    with held(task_id, workspace.folder):  # a task that runs is told so before anything else
        if record.state is TaskState.FINISHED:
            record.require_unfinished()
            publish_report(workspace)  # all that its run did not come to
            return tune_result(task_id)
        if not as_recorded:
            refuse_changes(workspace.folder)
        finish_creation(task_id, workspace.settings)
    return run_task(task_id)


def _refuse_queued(task_id: str, settings: Settings) -> None:
    """A task in the queue goes on by itself, on the GPUs that it is given."""
    queue = Queue(settings)
    entry = queue.open_entry(task_id)
    queue.close()
    if entry is not None:
        remedy = "`alto unpause` lets it go on" if entry.state is QueueState.PAUSED else "It goes on by itself"
        raise StoreError(f"task {task_id} is in the queue of the cluster, {entry.state}. {remedy}.")
