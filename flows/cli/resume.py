"""`alto resume`: a task that was killed, failed or was cancelled goes on in this process."""

from __future__ import annotations

from alto_core.loading import loading
from alto_core.store import Store
from flows.cli.tune import quiet_settings, run_shown
from flows.cli.view import Watcher


def run_resume(task_id: str, *, as_recorded: bool, as_json: bool, plain: bool) -> None:
    """Let a task go on from its last checkpoint, shown as `alto tune` shows it.

    Raises:
        StoreError: there is no such task, it has finished, another process is at work on it, or the cluster has it.
        TaskFileError: the task file, or a file that it names, is no longer what the task began with.
    """
    settings = quiet_settings()
    store = Store(settings)
    store.task(task_id).require_unfinished()  # here too, so that it is said before torch is imported
    events = store.events(task_id)

    def run() -> None:
        with loading():
            from flows.resume import resume

        resume(task_id, as_recorded=as_recorded)

    watcher = Watcher(store, task_id, last_event_id=events[-1].event_id if events else 0)
    run_shown(run, watcher, settings, as_json=as_json, plain=plain)
