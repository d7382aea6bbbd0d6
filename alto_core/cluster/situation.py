"""What there is to plan at one moment, read from the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from alto_core.cluster.expectation import share_left
from alto_core.queue_states import Priority, QueueState
from alto_core.scheduling.admission import TaskRequest
from alto_core.scheduling.instance import Host, Plan, RunningTask
from alto_core.settings import Settings
from alto_core.store import Fleet, HostRecord, KeptPlacement, KeptPlan, Queue, QueueEntry, Store

AGING = timedelta(days=1)
"""A task moves up one priority class for each such time that it has waited."""
USAGE_WINDOW = timedelta(days=7)
"""How far back GPU time counts for fair share."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One moment of the cluster, in the planner's terms."""

    now: datetime
    requests: tuple[TaskRequest, ...]
    hosts: tuple[Host, ...]
    running: tuple[RunningTask, ...]
    usage: Mapping[str, float]
    entries: Mapping[str, QueueEntry]
    """The submitted tasks that have not ended."""

    @property
    def num_free_gpus(self) -> int:
        return sum(len(host.gpus) for host in self.hosts) - sum(len(task.gpus) for task in self.running)


def read_situation(settings: Settings, now: datetime | None = None) -> Situation:
    """Read queue, hosts and progress."""
    now = now or datetime.now(UTC)
    store, queue, fleet = Store(settings), Queue(settings), Fleet(settings)
    entries = queue.entries()
    there = {record.host_id: record for record in fleet.hosts() if not record.is_lost}
    seconds = {entry.task_id: _seconds_left(entry, store, now) for entry in entries}
    situation = Situation(
        now=now,
        requests=tuple(_request(e, seconds[e.task_id], now) for e in entries if e.state is QueueState.WAITING),
        hosts=tuple(_host(record) for record in there.values()),
        running=tuple(
            RunningTask(
                task_id=entry.task_id,
                host_id=entry.host_id,
                gpus=entry.gpus,
                seconds=max(1, round(seconds[entry.task_id])),
            )
            for entry in entries
            if entry.state.holds_gpus and entry.host_id in there
        ),
        usage=_usage(store, queue.entries(*QueueState), now),
        entries={entry.task_id: entry for entry in entries},
    )
    for opened in (store, queue, fleet):
        opened.close()
    return situation


def kept_plan(plan: Plan, situation: Situation, reason: str) -> KeptPlan:
    """A plan and what runs beside it, in wall-clock time."""

    def at(seconds: int) -> datetime:
        return situation.now + timedelta(seconds=seconds)

    running = [
        KeptPlacement(
            task_id=task.task_id,
            host_id=task.host_id,
            gpus=task.gpus,
            start=situation.entries[task.task_id].claimed_at or situation.now,
            end=at(task.seconds),
        )
        for task in situation.running
    ]
    waiting = [
        KeptPlacement(task_id=p.task_id, host_id=p.host_id, gpus=p.gpus, start=at(p.start), end=at(p.end))
        for p in plan.placements
    ]
    return KeptPlan(
        at=situation.now,
        reason=reason,
        placements=(*running, *waiting),
        refusals={refusal.task_id: refusal.reason for refusal in plan.refusals},
        makespan=plan.makespan,
        bound=plan.bound,
        gap=plan.gap,
        tardiness=plan.tardiness,
        method=plan.method,
        solver_status=plan.solver_status,
        solve_seconds=plan.solve_seconds,
    )


def _host(record: HostRecord) -> Host:
    return Host(host_id=record.host_id, gpus=tuple(sorted(record.holders)), gpu_bytes=record.gpu_bytes)


def _request(entry: QueueEntry, seconds: float, now: datetime) -> TaskRequest:
    demand = entry.demand
    return TaskRequest(
        task_id=entry.task_id,
        num_gpus=demand.num_gpus,
        seconds=seconds,
        priority=_aged(demand.priority, now - entry.submitted_at),
        owner=entry.owner,
        deadline=None if demand.deadline is None else (demand.deadline - now).total_seconds(),
        min_gpu_bytes=demand.min_gpu_bytes,
    )


def _aged(priority: Priority, waited: timedelta) -> Priority:
    """A task that waits long comes before younger ones, so that wide tasks are not passed by small ones for ever."""
    classes = list(Priority)
    return classes[max(0, classes.index(priority) - waited // AGING)]


def _seconds_left(entry: QueueEntry, store: Store, now: datetime) -> float:
    """By the rows that are left; with no row trained yet, by the clock."""
    expected = entry.demand.expected_seconds
    share = share_left(store.jobs(entry.task_id))
    if share == 1.0 and entry.state is QueueState.RUNNING and entry.claimed_at is not None:
        return max(1.0, expected - (now - entry.claimed_at).total_seconds())
    return max(1.0, expected * share)


def _usage(store: Store, entries: Sequence[QueueEntry], now: datetime) -> dict[str, float]:
    """GPU-seconds by owner of the tasks that were submitted within the window."""
    usage: dict[str, float] = {}
    for entry in entries:
        if entry.submitted_at < now - USAGE_WINDOW:
            continue
        record = store.task(entry.task_id)
        ended = record.ended_at or now
        if record.started_at is not None:
            seconds = (ended - record.started_at).total_seconds()
            usage[entry.owner] = usage.get(entry.owner, 0.0) + seconds * entry.demand.num_gpus
    return usage
