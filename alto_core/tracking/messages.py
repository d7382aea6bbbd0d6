"""What can wait for MLflow: points, tags, states and files of one run each, in the form in which they are spooled.

Every message bears being sent twice. Points carry the millisecond in which they were logged, and MLflow's databases
hold a point of the same run, name, step, value and millisecond once; tags, states and files replace what was there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlflow.entities import Metric

TRAIN_LOSS = "train_loss"
VAL_LOSS = "val_loss"
GRAD_NORM = "grad_norm"


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Consecutive optimizer steps of a job. MLflow gets two points per step; the rest is for a resume."""

    run_id: str
    timestamp: int
    """Milliseconds since 1970."""
    first_step: int
    train_losses: Sequence[float]
    grad_norms: Sequence[float]
    learning_rates: Sequence[float]
    num_tokens: Sequence[int]

    @property
    def num_points(self) -> int:
        """How many points MLflow gets."""
        return 2 * len(self.train_losses)

    def metrics(self) -> list[Metric]:
        """As MLflow takes them."""
        at = self.timestamp
        points = []
        for key, values in ((TRAIN_LOSS, self.train_losses), (GRAD_NORM, self.grad_norms)):
            points += [Metric(key, value, at, step) for step, value in enumerate(values, self.first_step)]
        return points


@dataclass(frozen=True, kw_only=True)
class Values:
    """Metrics of a run at one step."""

    run_id: str
    timestamp: int
    step: int
    values: Mapping[str, float]

    @property
    def num_points(self) -> int:
        """How many points MLflow gets."""
        return len(self.values)

    def metrics(self) -> list[Metric]:
        """As MLflow takes them."""
        return [Metric(key, value, self.timestamp, self.step) for key, value in self.values.items()]


@dataclass(frozen=True, kw_only=True)
class Tags:
    """Tags of a run."""

    run_id: str
    tags: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of a run in MLflow's words."""

    run_id: str
    status: str
    end_time: int | None
    """Milliseconds since 1970; None opens the run again."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A file or a folder that becomes an artifact of a run."""

    run_id: str
    path: str
    """Under the task's folder, or absolute. Sent as it is by then."""
    folder: str | None
    """In the run's artifacts; None: at their top."""


Message = Steps | Values | Tags | Status | Upload

_KINDS: dict[str, type[Message]] = {
    "steps": Steps,
    "values": Values,
    "tags": Tags,
    "status": Status,
    "upload": Upload,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_dict(message: Message) -> dict[str, Any]:
    """For JSON."""
    return {"kind": _NAMES[type(message)], **vars(message)}


def from_dict(content: Mapping[str, Any]) -> Message:
    """Back from JSON."""
    return _KINDS[content["kind"]](**{name: value for name, value in content.items() if name != "kind"})
