"""The values that a report, a leaderboard and the terminal are made from. No store, no MLflow, no HTML here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from alto_core import wording
from alto_core.domain import GateEntry, Interval, JobState, LoraJob, Score, TaskState

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

    @property
    def label(self) -> str:
        """Short name for pictures: the three dimensions that a reader looks for."""
        return f"lr {wording.rate(self.job.learning_rate)} · r{self.job.lora_rank} · b{self.job.rows_per_update}"


@dataclass(frozen=True, kw_only=True)
class RegisteredVersion:
    """A version in the model registry."""

    name: str
    version: int
    aliases: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} version {self.version}" + (f" ({', '.join(self.aliases)})" if self.aliases else "")


@dataclass(frozen=True, kw_only=True)
class GateRecord:
    """What one gate decided about each job."""

    fraction: float
    """Where it stands, as a share of each job's own budget."""
    entries: tuple[GateEntry, ...]


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """What came out of a task. Stored as JSON with the task; `to_dict` and `from_dict` are inverse to each other."""

    winner: str | None = None
    """Job id; chosen on validation rows only."""
    scores: tuple[Score, ...] = ()
    """Finished jobs on `validation`; the winner and the untuned model (job id None) on `test`."""
    gates: tuple[GateRecord, ...] = ()
    num_train_rows: int | None = None
    seconds: float | None = None
    """Wall time of the whole task."""
    tokens_per_second: float | None = None
    tracking_share: float | None = None
    """Share of the wall time spent in calls to MLflow."""
    peak_bytes: int | None = None
    adapter_folder: str | None = None
    registered: RegisteredVersion | None = None
    data_report: Mapping[str, Any] = field(default_factory=dict)
    """`DataReport.to_dict()`."""

    def score(self, job_id: str | None, split: str) -> Score | None:
        return next((s for s in self.scores if s.job_id == job_id and s.split == split), None)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> TaskResult:
        """Read what `to_dict` wrote. Fields that are not there keep their defaults."""
        fields = dict(content)
        fields["scores"] = tuple(_score(s) for s in fields.get("scores", ()))
        fields["gates"] = tuple(_gate(g) for g in fields.get("gates", ()))
        if registered := fields.get("registered"):
            fields["registered"] = RegisteredVersion(**{**registered, "aliases": tuple(registered["aliases"])})
        return TaskResult(**fields)


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
class ReportData:
    """Everything that one report shows."""

    facts: TaskFacts
    jobs: tuple[JobRow, ...]
    curves: Mapping[str, Curve]
    """By job id; a job without measurements may be missing."""
    result: TaskResult = TaskResult()
    stages: tuple[StageTime, ...] = ()
    exits: tuple[ExitTime, ...] = ()
    warnings: tuple[str, ...] = ()
    tokens_per_second: float | None = None
    data_table: str = ""
    """What became of the data set's rows, as plain text."""


def _score(content: Mapping[str, Any]) -> Score:
    interval = content.get("metric_value")
    return Score(**{**content, "metric_value": Interval(**interval) if interval else None})


def _gate(content: Mapping[str, Any]) -> GateRecord:
    return GateRecord(fraction=content["fraction"], entries=tuple(GateEntry(**e) for e in content["entries"]))
