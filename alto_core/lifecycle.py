"""A task's states around its stages: running while they run, then finished, failed or cancelled, whatever ended them.

The same end is written to the store and to MLflow; jobs that have not ended by then are cancelled in both.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from alto_core.domain import TaskState
from alto_core.engine.ranks import release_ranks
from alto_core.interruption import TaskStopped
from alto_core.queue_states import StopRequest
from alto_core.resuming import take_up
from alto_core.store import EventDraft, EventRecord
from alto_core.task_lock import held
from alto_core.workspace import Workspace


@contextmanager
def running(task_id: str, *, patience_seconds: float = 0.0) -> Iterator[Workspace]:
    """Yields the task's workspace, held alone; records how the block ended.

    A task that was begun before goes on where it was left: its process died, or it failed or was cancelled.

    An `Exception` is a failure. A request to pause or to make room leaves the task open, to go on from its checkpoints.
    Anything else that ends the block (a request to cancel, Ctrl-C, a termination signal) is a cancellation.

    Args:
        task_id: the task.
        patience_seconds: how long to wait for another process that is at work on it.

    Raises:
        StoreError: there is no such task, it has finished, or another process is at work on it.
    """
    workspace = Workspace.open(task_id)
    workspace.store.task(task_id)  # before a folder is made for a task that is none
    with held(task_id, workspace.folder, patience_seconds=patience_seconds):
        take_up(workspace)
        workspace.store.start_task(task_id)
        try:
            with _recorded_end(workspace):
                yield workspace
        finally:
            release_ranks()  # the devices are others' now


@contextmanager
def _recorded_end(workspace: Workspace) -> Iterator[None]:
    task_id = workspace.task_id
    started, tracked_before = time.monotonic(), _tracking_seconds(workspace)
    try:
        yield
    except Exception as error:
        _measure(workspace, started, tracked_before)
        end_task(workspace, TaskState.FAILED, f"{type(error).__name__}: {error}")
        raise
    except TaskStopped as stopped:
        if stopped.stop is StopRequest.CANCEL:
            _measure(workspace, started, tracked_before)
            end_task(workspace, TaskState.CANCELLED, "cancelled")
        else:
            workspace.rewind()
            workspace.store.append_events(task_id, [EventDraft(kind="stopped", text=str(stopped))])
        raise
    except BaseException:
        _measure(workspace, started, tracked_before)
        end_task(workspace, TaskState.CANCELLED, "cancelled")
        raise
    _measure(workspace, started, tracked_before)
    end_task(workspace, TaskState.FINISHED, "")


def end_task(workspace: Workspace, state: TaskState, message: str) -> None:
    """End a task in MLflow and in the store, with its open jobs."""
    if message:
        workspace.store.append_events(workspace.task_id, [EventDraft(kind="error", text=message)])
    with workspace.tracked(workspace.settings.tracking_wait_seconds) as runs:
        runs.close(state, message)
    workspace.store.end_task(workspace.task_id, state, message)


def _measure(workspace: Workspace, started: float, tracked_before: float) -> None:
    """Note what the run took."""
    seconds = time.monotonic() - started
    tracking_seconds = _tracking_seconds(workspace) - tracked_before
    workspace.update_result(
        seconds=seconds,
        tracking_share=tracking_seconds / max(seconds, 1e-9),
        evaluation_share=_evaluation_share(workspace.store.events(workspace.task_id)),
        peak_bytes=_peak_resident_bytes(),
    )


def _tracking_seconds(workspace: Workspace) -> float:
    """What calls to MLflow have taken so far."""
    events = workspace.store.events(workspace.task_id)
    return sum(event.numbers["seconds"] for event in events if event.kind == "tracking")


def _evaluation_share(events: Sequence[EventRecord]) -> float | None:
    """Seconds of evaluations over seconds of steps; None before the first step."""
    progress = [event.numbers for event in events if event.kind == "progress"]
    steps, evaluations = (sum(n.get(name, 0.0) for n in progress) for name in ("step_seconds", "evaluation_seconds"))
    return evaluations / steps if steps else None


def _peak_resident_bytes() -> int:
    """Highest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
