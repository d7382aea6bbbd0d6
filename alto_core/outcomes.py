"""The values that come out of a task: what its profile stage measured, how its jobs ended, scores and comparisons.

Frozen, free of torch, MLflow and Prefect, as those of `domain`. `profiling` and `evaluation` make them.
"""

from __future__ import annotations

from dataclasses import dataclass

from alto_core.domain import JobState

Z95 = 1.96
"""Standard errors in half of a 95 % interval."""


@dataclass(frozen=True, kw_only=True)
class TaskProfile:
    """What the profile stage measured and decided for one task on one device."""

    device: str
    num_slots: int
    """Jobs that train side by side."""
    seconds_per_step: float
    tokens_per_second: float
    peak_bytes: int
    bytes_per_job: int
    """Adapter, gradient and optimizer moments of the largest job."""
    max_pass_tokens: int | None = None
    """Of one training pass; None: as the engine has it."""
    rank_rows: int | None = None
    """Of the slots; None: what the largest jobs need."""
    step_tokens: float | None = None
    """Token budget of a joint step; None: no bound."""
    num_ranks: int = 1
    """Devices that train; slots, rank rows and token budget are those of all of them, pass and peak those of one."""
    sharded: bool = False
    """Whether each device holds a part of the backbone; else all of it."""


@dataclass(frozen=True, kw_only=True)
class JobOutcome:
    """How one job ended."""

    job_id: str
    state: JobState
    reason: str
    step: int
    total_steps: int
    best_step: int | None
    best_val_loss: float | None
    gate_rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean over rows with its 95 % interval."""

    value: float
    low: float
    high: float
    num_rows: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, kw_only=True)
class Score:
    """What one adapter (or the untuned model, `job_id` None) reached on one split."""

    job_id: str | None
    split: str
    loss: float
    loss_standard_error: float
    metric: str | None = None
    metric_value: Interval | None = None

    @property
    def loss_error(self) -> float:
        """Half of the loss's 95 % interval."""
        return Z95 * self.loss_standard_error


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One adapter against another (the untuned model: None) on the same rows of a split."""

    job_id: str
    other_id: str | None
    split: str
    quantity: str
    """`loss`, or the name of a metric."""
    difference: Interval
    """The first's value minus the other's, with its paired bootstrap interval."""


@dataclass(frozen=True, kw_only=True)
class AnswerSample:
    """What winner and untuned model wrote to one prompt."""

    split: str
    prompt: str
    reference: str
    winner: str
    untuned: str
