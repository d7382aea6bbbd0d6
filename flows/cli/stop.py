"""`alto cancel`, `alto pause`, `alto unpause`: what a person asks of a task of the queue, or of one job of a task."""

from __future__ import annotations

import time

import typer

from alto_core import wording
from alto_core.cancelling import ask_to_cancel_job
from alto_core.domain import TaskState
from alto_core.errors import StoreError
from alto_core.queue_states import QueueState, StopRequest
from alto_core.settings import load_settings, prepare_environment
from alto_core.store import Queue, Store
from flows.cli.identity import who
from flows.cli.output import busy

PATIENCE_SECONDS = 30.0
POLL_SECONDS = 0.2


def run_stop(task_id: str, stop: StopRequest) -> None:
    """Ask a task to stop and wait until its GPUs are free.

    Raises:
        StoreError: it is not in the queue, or its GPUs are still held after a while.
        OwnerError: it is someone else's.
    """
    settings = load_settings()
    prepare_environment(settings)
    queue = Queue(settings)
    started = time.monotonic()
    queue.request_stop(task_id, stop, by=who(settings))
    with busy("waiting until its GPUs are free"):
        _wait_until_free(task_id, queue)
        if stop is StopRequest.CANCEL and not Store(settings).task(task_id).state.is_end:
            from alto_core.lifecycle import end_task
            from alto_core.workspace import Workspace

            end_task(Workspace(task_id, settings), TaskState.CANCELLED, "cancelled")
    word = {StopRequest.CANCEL: "cancelled", StopRequest.PAUSE: "paused"}[stop]
    if queue.entry(task_id).state is QueueState.ENDED:
        word = str(Store(settings).task(task_id).state)  # it may have finished in the meantime
    typer.echo(f"{task_id}: {word} after {wording.duration(time.monotonic() - started)}")


def _wait_until_free(task_id: str, queue: Queue) -> None:
    started = time.monotonic()
    while queue.entry(task_id).state.holds_gpus:
        if time.monotonic() - started > PATIENCE_SECONDS:
            host_id = queue.entry(task_id).host_id
            raise StoreError(
                f"task {task_id} still holds its GPUs on {host_id} after {PATIENCE_SECONDS:.0f} s. Is `alto up` "
                "running there? When its lease is over, `alto reconcile` takes them back."
            )
        time.sleep(POLL_SECONDS)


def run_cancel_job(task_id: str, job: str) -> None:
    """Ask for the end of one job of a task that is running or waiting.

    Raises:
        StoreError: there is no such task or job, or it has ended.
        OwnerError: the task is someone else's.
    """
    from alto_core.workspace import Workspace

    settings = load_settings()
    prepare_environment(settings)
    workspace = Workspace(task_id, settings)
    job_id = workspace.find_job(job)
    ask_to_cancel_job(workspace.store, task_id, job_id, by=who(settings))
    typer.echo(f"{job_id}: ends at the next evaluation of {task_id}; the other jobs go on")


def run_unpause(task_id: str) -> None:
    """Let a paused task wait for GPUs again."""
    settings = load_settings()
    prepare_environment(settings)
    Queue(settings).unpause(task_id, by=who(settings))
    typer.echo(f"{task_id}: waits for GPUs, goes on from its checkpoints")
