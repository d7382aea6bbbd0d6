"""The values that a report, a leaderboard and the terminal are made from. No store, no MLflow, no HTML here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from alto_core import wording
from alto_core.domain import GateEntry, JobState, LoraJob, TaskState
from alto_core.result import TaskResult

if TYPE_CHECKING:
    from alto_core.early_exit.curves import Curve


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """One job as a reader sees it: its configuration and where it stands."""

    job: LoraJob
    state: JobState
    total_steps: int
    warmup_steps: int
    step: int = 0
    """Optimizer updates made."""
    reason: str = ""
    """Why it ended, one sentence."""
    train_loss: float | None = None
    val_loss: float | None = None
    best_val_loss: float | None = None
    best_step: int | None = None
    gate_rank: int | None = None

    @property
    def job_id(self) -> str:
        return self.job.job_id

    def was_revived_after(self, entry: GateEntry) -> bool:
        """Whether it went its whole way although this gate had ended it."""
        return not entry.kept and entry.gate_rank is not None and self.state is JobState.FINISHED

    @property
    def label(self) -> str:
        """Short name for pictures: the three dimensions that a reader looks for."""
        return f"lr {wording.rate(self.job.learning_rate)} · r{self.job.lora_rank} · b{self.job.rows_per_update}"


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """The head of a report."""

    task_id: str
    name: str
    owner: str
    state: TaskState
    model: str
    data: str
    metric: str | None = None
    choose_by: Literal["val_loss", "metric"] = "val_loss"
    task_digest: str = ""
    task_file: str = ""
    """The checked task file in YAML, defaults included."""
    message: str = ""
    created: datetime | None = None
    started: datetime | None = None
    ended: datetime | None = None
    parent_run_id: str | None = None

    @property
    def seconds(self) -> float | None:
        if self.started is None or self.ended is None:
            return None
        return (self.ended - self.started).total_seconds()


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """When a stage began."""

    stage: str
    seconds: float
    """After the task's start."""


@dataclass(frozen=True, kw_only=True)
class ExitTime:
    """When a job ended."""

    job_id: str
    seconds: float
    """After the task's start."""


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """One decision, or something else that a reader may want to look up."""

    seconds: float
    """After the task's start."""
    kind: str
    job_id: str | None
    text: str


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """Everything that one report shows."""

    facts: TaskFacts
    jobs: tuple[JobRow, ...]
    curves: Mapping[str, Curve]
    """By job id; a job without measurements may be missing."""
    result: TaskResult = field(default_factory=TaskResult)
    stages: tuple[StageTime, ...] = ()
    exits: tuple[ExitTime, ...] = ()
    warnings: tuple[str, ...] = ()
    log: tuple[LogLine, ...] = ()
    tokens_per_second: float | None = None
    device: str | None = None
    """Where it trained."""
    data_table: str = ""
    """What became of the data set's rows, as plain text."""
