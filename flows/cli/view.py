"""What a task looks like at one moment: its record, its jobs, and what its events add up to. No terminal here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from alto_core.domain import JobState, Stage, TaskState
from alto_core.errors import StoreError
from alto_core.report import JobRow, SampleCount, count_samples
from alto_core.report.load import job_rows
from alto_core.result import TaskResult
from alto_core.store import EventRecord, Store, TaskRecord

RECENT_EVENTS = 6


@dataclass(frozen=True, kw_only=True)
class TaskView:
    """One moment of a task."""

    task_id: str
    record: TaskRecord | None
    """None while the task is still being prepared and has no record."""
    jobs: tuple[JobRow, ...] = ()
    new_events: tuple[EventRecord, ...] = ()
    """Events since the moment before."""
    recent_events: tuple[EventRecord, ...] = ()
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    is_forecast: bool = False
    """`seconds_left` counts on jobs that end early; else it is an upper bound."""
    elapsed_seconds: float = 0.0

    @property
    def state(self) -> TaskState:
        return TaskState.QUEUED if self.record is None else self.record.state

    @property
    def state_word(self) -> str:
        return "preparing" if self.record is None else str(self.record.state)

    @property
    def stage(self) -> Stage | None:
        return None if self.record is None or not self.record.stage else Stage(self.record.stage)

    @property
    def result(self) -> TaskResult:
        return TaskResult.from_dict((self.record.result if self.record else None) or {})

    @property
    def samples(self) -> SampleCount:
        return count_samples(self.jobs, num_train_rows=self.result.num_train_rows)


@dataclass
class Watcher:
    """Reads a task from the store again and again, each event once."""

    store: Store
    task_id: str
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    """Used until the task has a record, which knows when it was made and started."""
    last_event_id: int = 0
    """Only later events are new."""
    _recent: tuple[EventRecord, ...] = ()
    _numbers: dict[str, float] = field(default_factory=dict)
    _training_since: datetime | None = None

    def look(self) -> TaskView:
        """The task as it is now. A task without a record yet is shown as queued."""
        try:
            record = self.store.task(self.task_id)
        except StoreError:
            return TaskView(task_id=self.task_id, record=None, elapsed_seconds=self._elapsed(None))
        jobs = job_rows(self.store.jobs(self.task_id))
        events = self.store.events(self.task_id, after_id=self.last_event_id)
        for event in events:
            self._take(event)
        return TaskView(
            task_id=self.task_id,
            record=record,
            jobs=jobs,
            new_events=events,
            recent_events=self._recent,
            tokens_per_second=self._numbers.get("tokens_per_second"),
            seconds_left=None if record.state.is_end else self._seconds_left(jobs),
            is_forecast="seconds_left" in self._numbers,
            elapsed_seconds=self._elapsed(record),
        )

    def _take(self, event: EventRecord) -> None:
        self.last_event_id = event.event_id
        if event.kind in ("progress", "forecast"):
            self._numbers.update(event.numbers)
        elif event.kind == "stage" and event.text == Stage.WARMUP:
            self._training_since = event.at
        if event.text:
            self._recent = (*self._recent, event)[-RECENT_EVENTS:]

    def _elapsed(self, record: TaskRecord | None) -> float:
        started = (record.started_at or record.created_at) if record else self.started
        ended = record.ended_at if record and record.ended_at else datetime.now(UTC)
        return max(0.0, (ended - started).total_seconds())

    def _seconds_left(self, jobs: Sequence[JobRow]) -> float | None:
        """What the task says; else the rows that living jobs may still train, at the speed so far (an upper bound)."""
        if "seconds_left" in self._numbers:
            return self._numbers["seconds_left"]
        trained = sum(row.step * row.job.rows_per_update for row in jobs)
        if self._training_since is None or not trained:
            return None
        seconds = (datetime.now(UTC) - self._training_since).total_seconds()
        left = sum((row.total_steps - row.step) * row.job.rows_per_update for row in jobs if not row.state.is_end)
        return seconds * left / trained if left else None


def group_of(row: JobRow) -> int:
    """Running, waiting, finished, ended early: the order in which jobs matter to someone who watches."""
    order = (JobState.RUNNING, JobState.WAITING, JobState.FINISHED)
    return order.index(row.state) if row.state in order else len(order)
