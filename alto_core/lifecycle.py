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
from alto_core.store import EventDraft, EventRecord
from alto_core.workspace import Workspace


@contextmanager
def running(task_id: str) -> Iterator[Workspace]:
    """Yields the task's workspace; records how the block ended.

    An `Exception` is a failure. Anything else that ends the block (Ctrl-C, a termination signal) is a cancellation.
    """
    workspace = Workspace.open(task_id)
    workspace.store.start_task(task_id)
    started, tracked_before = time.monotonic(), _tracking_seconds(workspace)
    try:
        yield workspace
    except Exception as error:
        _end(workspace, TaskState.FAILED, f"{type(error).__name__}: {error}", started, tracked_before)
        raise
    except BaseException:
        _end(workspace, TaskState.CANCELLED, "cancelled", started, tracked_before)
        raise
    _end(workspace, TaskState.FINISHED, "", started, tracked_before)


def _end(workspace: Workspace, state: TaskState, message: str, started: float, tracked_before: float) -> None:
    task_id, store = workspace.task_id, workspace.store
    seconds = time.monotonic() - started
    tracking_seconds = _tracking_seconds(workspace) - tracked_before
    if message:
        store.append_events(task_id, [EventDraft(kind="error", text=message)])
    workspace.update_result(
        seconds=seconds,
        tracking_share=tracking_seconds / max(seconds, 1e-9),
        evaluation_share=_evaluation_share(store.events(task_id)),
        peak_bytes=_peak_resident_bytes(),
    )
    with workspace.tracked() as runs:
        runs.close(state, message)
    store.end_task(task_id, state, message)


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
