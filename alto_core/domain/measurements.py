"""What the executor measures while jobs train, and yields at its boundaries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step of one job."""

    job_id: str
    step: int
    """1-based: the number of updates made, this one included."""
    train_loss: float
    """Mean over the step's trained tokens, before the update; nats per token."""
    learning_rate: float
    grad_norm: float
    """Euclidean norm of the job's gradient before clipping."""
    num_tokens: int
    """Tokens of the step's rows, prompts included."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """What the objective tells beside the loss, by name; means over the update's pairs."""


@dataclass(frozen=True, kw_only=True)
class RowLosses:
    """Validation loss row by row, for paired comparisons. Equal indices of different jobs mean the same row."""

    loss_sums: tuple[float, ...]
    """Sum of token losses of each row, nats."""
    num_labels: tuple[int, ...]
    """Trained tokens of each row."""

    @property
    def mean(self) -> float:
        """Loss per trained token over all rows, independent of how rows were batched."""
        return math.fsum(self.loss_sums) / sum(self.num_labels)

    @property
    def token_loss_sums(self) -> tuple[float, ...]:
        """Sum of all token losses of each row, whatever the objective makes of them."""
        return self.loss_sums


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One job's validation at one of its evaluation steps."""

    job_id: str
    step: int
    fraction: float
    """Step over the job's total steps."""
    row_losses: RowLosses
    measures: Mapping[str, float] = field(default_factory=dict)
    """What the objective tells beside the loss, by name."""

    @property
    def val_loss(self) -> float:
        return self.row_losses.mean


@dataclass(frozen=True, kw_only=True)
class JobFailure:
    """A job that cannot go on, for a reason of its own."""

    job_id: str
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class MemoryShortage:
    """Memory ran out, and what the executor did about it. The step was undone and made again."""

    text: str
    """One sentence for people."""
    max_pass_tokens: int
    """Of a pass from now on."""
    evicted_job_id: str | None = None
    """The job that waits for room now; its state is kept."""


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """What the executor measured since the last boundary. It waits for verdicts before it goes on."""

    steps: tuple[StepRecord, ...]
    evaluations: tuple[Evaluation, ...]
    failures: tuple[JobFailure, ...] = ()
    shortages: tuple[MemoryShortage, ...] = ()
    running: tuple[str, ...] = ()
    """Ids of the jobs that hold a slot."""
    waiting: tuple[str, ...] = ()
    """Ids of the jobs that wait for one."""
    tokens_per_second: float = 0.0
    step_seconds: float = 0.0
    """Wall time of the joint steps since the last boundary."""
    evaluation_seconds: float = 0.0
    """Wall time of this boundary's evaluations."""
