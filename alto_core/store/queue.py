"""The queue of the cluster: who waits, who may run where, and who holds which GPU.

Every change is one transaction that is alone in writing, so two schedulers cannot give a task or a GPU away twice. A
run acts for a task under the number of its attempt; when the task was given to another attempt, it is told so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from sqlmodel import col, func, select

from alto_core.domain import TaskState
from alto_core.errors import StoreError
from alto_core.ownership import Person
from alto_core.queue_states import QueueState, StopRequest
from alto_core.store.database import StorePart
from alto_core.store.queue_records import Demand, KeptPlan, QueueEntry, QueueEvent
from alto_core.store.queue_rows import (
    free_gpus,
    kept_plan,
    log_event,
    now,
    plan_row,
    queue_entry,
    queue_row,
    require_owner,
)
from alto_core.store.rows import task_row
from alto_core.store.tables import GpuRow, HostRow, PlanRow, QueueEventRow, QueueRow, TaskRow
from alto_core.wording import plural

AFTER_STOP = {
    StopRequest.CANCEL: QueueState.ENDED,
    StopRequest.PAUSE: QueueState.PAUSED,
    StopRequest.PREEMPT: QueueState.WAITING,
}
"""What becomes of a task that did what it was asked to."""
REPLAN_KINDS = ("submitted", "released", "unpaused", "host-joined", "host-lost", "host-left")
"""Events after which another plan may be better."""


class Queue(StorePart):
    """The queue of one store, safe to use from several threads, processes and hosts.

    Raises:
        StoreError: the database cannot be opened.
    """

    def submit(self, task_id: str, demand: Demand) -> None:
        """Put a recorded task into the queue.

        Raises:
            StoreError: there is no such task, it is no longer queued, or it was submitted before.
        """
        with self._database.writing() as session:
            task = task_row(session, task_id)
            if task.state != TaskState.QUEUED or session.get(QueueRow, task_id) is not None:
                raise StoreError(f"task {task_id}: got a {task.state} task to submit, expected a new one, once")
            row = QueueRow(
                task_id=task_id,
                priority=demand.priority,
                deadline=demand.deadline,
                num_gpus=demand.num_gpus,
                min_gpu_bytes=demand.min_gpu_bytes,
                expected_seconds=demand.expected_seconds,
                submitted_at=now(),
                state=QueueState.WAITING,
            )
            session.add(row)
            log_event(session, "submitted", f"{plural(demand.num_gpus, 'GPU')}, {demand.priority}", task_id=task_id)

    def claim(self, task_id: str, host_id: str, gpus: Sequence[int]) -> int | None:
        """Take GPUs for a waiting task, all of them or none.

        Returns:
            The number of the attempt; None when the task no longer waits, a GPU is held or gone, or the host is lost:
            someone else was faster, or the plan is old.
        """
        with self._database.writing() as session:
            row, host = session.get(QueueRow, task_id), session.get(HostRow, host_id)
            rows = [session.get(GpuRow, (host_id, gpu)) for gpu in gpus]
            if (
                row is None
                or row.state != QueueState.WAITING
                or host is None
                or host.is_lost
                or len(set(gpus)) != row.num_gpus
            ):
                return None
            if any(gpu is None or gpu.task_id is not None for gpu in rows):
                return None
            for gpu in rows:
                assert gpu is not None
                gpu.task_id = task_id
                session.add(gpu)
            row.state, row.attempt, row.stop = QueueState.CLAIMED, row.attempt + 1, None
            row.host_id, row.gpus = host_id, json.dumps(sorted(gpus))
            row.claimed_at, row.heartbeat_at = now(), None
            row.process_id, row.flow_run_id = None, None
            session.add(row)
            where = f"GPU {', '.join(map(str, sorted(gpus)))} of {host_id}, attempt {row.attempt}"
            log_event(session, "claimed", where, task_id=task_id, host_id=host_id)
            return row.attempt

    def note_flow_run(self, task_id: str, attempt: int, flow_run_id: str) -> None:
        """Note which Prefect flow run carries an attempt out."""
        with self._database.writing() as session:
            row = session.get(QueueRow, task_id)
            if row is not None and row.attempt == attempt:
                row.flow_run_id = flow_run_id
                session.add(row)

    def begin(self, task_id: str, attempt: int, process_id: int) -> QueueEntry:
        """Begin the run of a claim. It can be done once.

        Raises:
            StoreError: the claim was given up, or its run has begun before.
        """
        with self._database.writing() as session:
            row = queue_row(session, task_id)
            if row.attempt != attempt or row.state != QueueState.CLAIMED:
                raise StoreError(
                    f"task {task_id}: got attempt {attempt} to begin, expected a claimed one; it is {row.state} in "
                    f"attempt {row.attempt}. A task runs once at a time: leave it to the scheduler."
                )
            row.state, row.heartbeat_at, row.process_id = QueueState.RUNNING, now(), process_id
            session.add(row)
            for gpu in session.exec(select(GpuRow).where(GpuRow.task_id == task_id)):
                gpu.process_id = process_id
                session.add(gpu)
            log_event(session, "begun", f"process {process_id}", task_id=task_id, host_id=row.host_id)
            return queue_entry(row, task_row(session, task_id))

    def last_processes(self, task_id: str) -> tuple[int, ...]:
        """Ids, on their host, of the processes that used the GPUs of a claim before."""
        query = select(GpuRow.process_id).where(GpuRow.task_id == task_id, col(GpuRow.process_id).is_not(None))
        with self._database.reading() as session:
            return tuple(sorted({process_id for process_id in session.exec(query) if process_id is not None}))

    def beat(self, task_id: str, attempt: int) -> None:
        """A sign of life of a run."""
        with self._database.writing() as session:
            row = queue_row(session, task_id)
            if row.attempt == attempt and row.state == QueueState.RUNNING:
                row.heartbeat_at = now()
                session.add(row)

    def release(self, task_id: str, attempt: int, state: QueueState, reason: str, *, died: bool = False) -> bool:
        """Give the GPUs of an attempt back; the task then waits, pauses or has ended.

        Args:
            task_id: the task.
            attempt: whose GPUs; of an attempt that was given up nothing is left to give back.
            state: `WAITING`, `PAUSED` or `ENDED`.
            reason: one sentence for the log.
            died: the run ended without saying so.

        Returns:
            Whether this call did it.
        """
        assert not state.holds_gpus
        with self._database.writing() as session:
            row = queue_row(session, task_id)
            if row.attempt != attempt or not QueueState(row.state).holds_gpus:
                return False
            row.num_failures += died
            free_gpus(session, row, state, reason)
            return True

    def request_stop(self, task_id: str, stop: StopRequest, by: Person | None = None) -> QueueEntry:
        """Ask a task to stop: a running one is told by its next look, another is changed at once.

        Args:
            task_id: the task.
            stop: what is to become of it.
            by: who asks; None: ALTO itself, to make room.

        Raises:
            StoreError: it was never submitted, or has ended.
            OwnerError: it is someone else's.
        """
        with self._database.writing() as session:
            row = queue_row(session, task_id)
            require_owner(session, task_id, by, str(stop))
            if row.state == QueueState.ENDED:
                state = task_row(session, task_id).state
                raise StoreError(f"task {task_id} has ended ({state}), expected one in the queue to {stop}")
            told = f"{row.state}, by {by.name}" if by and by.name else row.state
            log_event(session, f"asked-to-{stop}", told, task_id=task_id, host_id=row.host_id)
            if row.state == QueueState.RUNNING:
                if row.stop != StopRequest.CANCEL:
                    row.stop = stop
            elif row.state == QueueState.CLAIMED:
                free_gpus(session, row, AFTER_STOP[stop], f"asked to {stop} before its run began")
            elif stop is not StopRequest.PREEMPT:
                row.state = AFTER_STOP[stop]
            session.add(row)
            return queue_entry(row, task_row(session, task_id))

    def unpause(self, task_id: str, by: Person | None = None) -> None:
        """Let a paused task wait for GPUs again.

        Raises:
            StoreError: it was never submitted, or is not paused.
            OwnerError: it is someone else's.
        """
        with self._database.writing() as session:
            row = queue_row(session, task_id)
            require_owner(session, task_id, by, "unpause")
            if row.state != QueueState.PAUSED:
                raise StoreError(f"task {task_id}: got state {row.state} to unpause, expected a paused one")
            row.state = QueueState.WAITING
            session.add(row)
            log_event(session, "unpaused", "waits for GPUs", task_id=task_id)

    def entry(self, task_id: str) -> QueueEntry:
        """One submitted task.

        Raises:
            StoreError: it was never submitted.
        """
        with self._database.reading() as session:
            return queue_entry(queue_row(session, task_id), task_row(session, task_id))

    def open_entry(self, task_id: str) -> QueueEntry | None:
        """A task of the queue that has not ended there; None for any other."""
        return next((entry for entry in self.entries() if entry.task_id == task_id), None)

    def entries(self, *states: QueueState) -> tuple[QueueEntry, ...]:
        """Submitted tasks in these states, or all that have not ended; in the order of submission."""
        wanted = states or tuple(state for state in QueueState if state is not QueueState.ENDED)
        query = (
            select(QueueRow, TaskRow)
            .where(QueueRow.task_id == TaskRow.task_id, col(QueueRow.state).in_(wanted))
            .order_by(col(QueueRow.submitted_at), col(QueueRow.task_id))
        )
        with self._database.reading() as session:
            return tuple(queue_entry(row, task) for row, task in session.exec(query))

    def version(self) -> int:
        """Rises whenever another plan may be better than the last."""
        query = select(func.max(QueueEventRow.event_id)).where(col(QueueEventRow.kind).in_(REPLAN_KINDS))
        with self._database.reading() as session:
            return session.exec(query).one() or 0

    def events(self, after_id: int = 0, task_id: str | None = None) -> tuple[QueueEvent, ...]:
        """What happened, in order, from behind an event."""
        query = (
            select(QueueEventRow).where(col(QueueEventRow.event_id) > after_id).order_by(col(QueueEventRow.event_id))
        )
        if task_id is not None:
            query = query.where(QueueEventRow.task_id == task_id)
        with self._database.reading() as session:
            return tuple(QueueEvent(**row.model_dump()) for row in session.exec(query))

    def keep_plan(self, plan: KeptPlan) -> None:
        """Add a plan to the record of plans."""
        with self._database.writing() as session:
            session.add(plan_row(plan))

    def latest_plan(self) -> KeptPlan | None:
        """The plan made last."""
        query = select(PlanRow).order_by(col(PlanRow.plan_id).desc()).limit(1)
        with self._database.reading() as session:
            row = session.exec(query).first()
            return None if row is None else kept_plan(row)
