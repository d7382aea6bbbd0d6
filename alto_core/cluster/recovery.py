"""Finds runs and hosts that are dead, takes their GPUs back, and lets the tasks go on from their last checkpoints.

Signs of life decide, not what Prefect thinks of a run: a healthy run that Prefect takes for crashed goes on. A run that
Prefect knows to have ended is given less patience, and one whose process is gone from this host none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from alto_core.domain import TaskState
from alto_core.queue_states import QueueState, StopRequest
from alto_core.settings import Settings
from alto_core.store import EventDraft, Fleet, Queue, QueueEntry

MAX_FAILURES = 3
"""A task whose runs die so often fails: it would take the GPUs from others for ever."""
ENDED_PATIENCE = timedelta(seconds=10)
"""For the last sign of life of a run that Prefect knows to have ended."""
START_PATIENCE = timedelta(minutes=5)
"""For a claimed run to begin: on a busy host libraries take a minute to load."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that was dead, and what was done about it."""

    text: str
    task_id: str | None = None
    host_id: str | None = None
    flow_run_id: str | None = None


def recover(
    settings: Settings,
    *,
    ended_flow_runs: Mapping[str, str] | None = None,
    is_gone: Callable[[QueueEntry], bool] = lambda entry: False,
    now: datetime | None = None,
) -> tuple[Finding, ...]:
    """Take dead runs' GPUs back and mark silent hosts as lost. Safe to do from several places at once.

    Args:
        settings: the store, and how long a lease is.
        ended_flow_runs: state names, by id, of the Prefect flow runs that have ended.
        is_gone: whether a run's process is known not to be there.
        now: the moment to judge from.
    """
    now = now or datetime.now(UTC)
    queue, fleet = Queue(settings), Fleet(settings)
    findings = []
    lease = timedelta(seconds=settings.lease_seconds)
    for host in fleet.silent(settings.lease_seconds):
        if fleet.lose(host.host_id, silent_since=now - lease):
            findings.append(Finding(text=f"host {host.host_id} is silent: lost", host_id=host.host_id))
    for entry in queue.entries(QueueState.CLAIMED, QueueState.RUNNING):
        ended = (ended_flow_runs or {}).get(entry.flow_run_id or "")
        why = "its process is gone" if is_gone(entry) else _why_dead(entry, ended, lease, now)
        if why is not None:
            findings.append(_take_back(entry, why, ended, queue, settings))
    queue.close()
    fleet.close()
    for finding in findings:
        logger.warning("%s", finding.text)
    return tuple(findings)


def _why_dead(entry: QueueEntry, ended: str | None, lease: timedelta, now: datetime) -> str | None:
    if entry.state is QueueState.CLAIMED:
        claimed = entry.claimed_at or now
        if ended is not None and now - claimed > ENDED_PATIENCE:
            return f"its flow run ended as {ended} before it began"
        patience = max(START_PATIENCE, lease)
        seconds = f"{patience.total_seconds():.0f} s"
        why = f"its run did not begin within {seconds}; the logs in ALTO_HOME and Prefect's UI say more"
        return why if now - claimed > patience else None
    heard = entry.heartbeat_at or entry.claimed_at or now
    if ended is not None and now - heard > ENDED_PATIENCE:
        return f"its flow run ended as {ended} and it gives no sign of life"
    return f"no sign of life since {heard:%H:%M:%S} UTC" if now - heard > lease else None


def _take_back(entry: QueueEntry, why: str, ended: str | None, queue: Queue, settings: Settings) -> Finding:
    """Decide what becomes of the task; the record of the task is changed by whoever gives its GPUs back, once."""
    # here, because they take torch: a scheduler that finds nothing dead starts ten seconds sooner without it
    from alto_core.lifecycle import end_task
    from alto_core.workspace import Workspace

    workspace = Workspace(entry.task_id, settings)
    record = workspace.store.task(entry.task_id)
    cancelled = entry.stop is StopRequest.CANCEL or ended == "Cancelled"
    if record.state.is_end:
        state, fate = QueueState.ENDED, f"it had {record.state}"
    elif cancelled:
        state, fate = QueueState.ENDED, "cancelled"
    elif entry.num_failures + 1 >= MAX_FAILURES:
        state, fate = QueueState.ENDED, f"failed after {MAX_FAILURES} such runs"
    elif entry.stop is StopRequest.PAUSE:
        state, fate = QueueState.PAUSED, "paused"
    else:
        state, fate = QueueState.WAITING, "waits to go on from its last checkpoint"
    if queue.release(entry.task_id, entry.attempt, state, why, died=not cancelled):
        if state is not QueueState.ENDED:
            workspace.rewind()
        elif not record.state.is_end:
            end = TaskState.CANCELLED if cancelled else TaskState.FAILED
            end_task(workspace, end, "cancelled" if cancelled else f"{MAX_FAILURES} runs died, the last one: {why}")
        workspace.store.append_events(entry.task_id, [EventDraft(kind="recovery", text=f"{why}; {fate}")])
    workspace.store.close()
    return Finding(
        text=f"task {entry.task_id}, attempt {entry.attempt}: {why}; {fate}",
        task_id=entry.task_id,
        host_id=entry.host_id,
        flow_run_id=entry.flow_run_id,
    )
