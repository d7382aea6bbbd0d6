"""What comes out of a task: winner, scores, gates, registered version. Kept with the task in the store, as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from alto_core.domain import GateEntry
from alto_core.outcomes import AnswerSample, Comparison, Interval, Score


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
    """The jobs that may win on `validation`; the winner and the untuned model (job id None) on `test`."""
    comparisons: tuple[Comparison, ...] = ()
    """Winner against the other candidates on `validation`, against the untuned model on `test`."""
    check_losses: tuple[float, ...] = ()
    """Loss sums of the winner on the first held-out rows; an exported copy must give the same."""
    samples: tuple[AnswerSample, ...] = ()
    """A few answers of winner and untuned model, for people to read."""
    gates: tuple[GateRecord, ...] = ()
    num_train_rows: int | None = None
    seconds: float | None = None
    """Wall time of the whole task."""
    tokens_per_second: float | None = None
    tracking_share: float | None = None
    """Share of the wall time spent in calls to MLflow."""
    evaluation_share: float | None = None
    """Wall time of the evaluations over that of the training steps."""
    peak_bytes: int | None = None
    adapter_folder: str | None = None
    registered: RegisteredVersion | None = None
    data_report: Mapping[str, Any] = field(default_factory=dict)
    """`DataReport.to_dict()`."""

    def comparison(self, other_id: str | None, split: str, quantity: str) -> Comparison | None:
        """The winner against another."""
        return next(
            (c for c in self.comparisons if (c.other_id, c.split, c.quantity) == (other_id, split, quantity)), None
        )

    def score(self, job_id: str | None, split: str) -> Score | None:
        return next((s for s in self.scores if s.job_id == job_id and s.split == split), None)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> TaskResult:
        """Read what `to_dict` wrote. Fields that are not there keep their defaults."""
        fields = dict(content)
        fields["scores"] = tuple(_score(s) for s in fields.get("scores", ()))
        fields["comparisons"] = tuple(
            Comparison(**{**c, "difference": Interval(**c["difference"])}) for c in fields.get("comparisons", ())
        )
        fields["check_losses"] = tuple(fields.get("check_losses", ()))
        fields["samples"] = tuple(AnswerSample(**s) for s in fields.get("samples", ()))
        fields["gates"] = tuple(_gate(g) for g in fields.get("gates", ()))
        if registered := fields.get("registered"):
            fields["registered"] = RegisteredVersion(**{**registered, "aliases": tuple(registered["aliases"])})
        return TaskResult(**fields)


def _score(content: Mapping[str, Any]) -> Score:
    interval = content.get("metric_value")
    return Score(**{**content, "metric_value": Interval(**interval) if interval else None})


def _gate(content: Mapping[str, Any]) -> GateRecord:
    return GateRecord(fraction=content["fraction"], entries=tuple(GateEntry(**e) for e in content["entries"]))
