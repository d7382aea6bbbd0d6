"""How long a task will take, as a sum of terms, each from something measured: passes, and what comes beside them.

Without early exit every job trains its whole budget. With it the training after the gate shrinks by what the policy
saved in past tasks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

PRIOR_SAVINGS = {"none": 0.0, "guarded": 0.5, "paper": 0.7}
"""Share of the training rows that a preset saves, before any task has shown it."""
PRIOR_TASKS = 1.0
"""Weight of the prior, in tasks."""


@dataclass(frozen=True, kw_only=True)
class PassSpeed:
    """Seconds of a training pass: `base + per_token x tokens`."""

    base_seconds: float
    seconds_per_token: float
    eval_share: float = 1 / 3
    """Of a training token's time that an evaluated token takes: forward alone."""

    def step_seconds(self, tokens: float, max_pass_tokens: int) -> float:
        """Of a joint step, cut into passes."""
        return self.base_seconds * max(1, math.ceil(tokens / max_pass_tokens)) + self.seconds_per_token * tokens

    def pass_seconds(self, tokens: float) -> float:
        """Of one pass."""
        return self.base_seconds + self.seconds_per_token * tokens

    def evaluation_seconds(self, tokens: float) -> float:
        return self.eval_share * self.seconds_per_token * tokens

    def on_ranks(self, num_ranks: int) -> PassSpeed:
        """Of as many passes side by side, counted as one."""
        return dataclasses.replace(self, seconds_per_token=self.seconds_per_token / num_ranks)


CACHED_COMPILE_SHARE = 0.2
"""Of the time to compile a model's layers and kernels, about, where an earlier process has left them in the caches."""


@dataclass(frozen=True, kw_only=True)
class SideCosts:
    """What a task pays beside its passes, in seconds."""

    captures: bool = False
    """Passes are captured; a capture takes as long for few tokens as for many."""
    capture_seconds: float = 0.0
    """Of a training pass, with the run before it."""
    evaluation_capture_seconds: float = 0.0
    """Of a pass without gradients."""
    compile_seconds: float = 0.0
    """That the first passes of a process take longer, to compile the model's layers and kernels."""
    load_seconds: float = 0.0
    """To load the model."""
    engine_seconds: float = 0.0
    """To open and close an engine."""
    admit_seconds: float = 0.0
    """To give a job its slot and its start; this and what follows is for each rank row of the job."""
    restore_seconds: float = 0.0
    """To read a job's state into its slot."""
    leave_seconds: float = 0.0
    """To copy the state of a job that leaves, and write its adapter."""
    write_seconds: float = 0.0
    """To write its state, beside the training of others."""
    state_bytes: float = 0.0
    """Of its state."""

    def once_loaded(self, *, is_compiled: bool) -> SideCosts:
        """What is left to pay in a process that has loaded the model: it has compiled it, or finds it in the caches."""
        left = 0.0 if is_compiled else CACHED_COMPILE_SHARE * self.compile_seconds
        return dataclasses.replace(self, load_seconds=0.0, compile_seconds=left)


def fit_speed(measured: Sequence[tuple[float, float]]) -> PassSpeed:
    """Least squares over (tokens, seconds) of passes, weighted so that relative errors count. Neither part is negative.

    Raises:
        ValueError: nothing was measured.
    """
    if not measured:
        raise ValueError("expected at least one measured pass, but got none")
    weights = [1 / seconds**2 for _, seconds in measured]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, measured, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, measured, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, measured, strict=True))
    slope = (
        sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, measured, strict=True)) / spread
        if spread
        else mean_y / mean_x
    )
    slope = min(max(slope, 0.0), mean_y / mean_x)
    return PassSpeed(base_seconds=max(0.0, mean_y - slope * mean_x), seconds_per_token=slope)


@dataclass(frozen=True, kw_only=True)
class DurationTerms:
    """What the seconds of a task's training consist of."""

    training: float = 0.0
    """Steps at their steady speed."""
    evaluation: float = 0.0
    captures: float = 0.0
    compilation: float = 0.0
    checkpoints: float = 0.0
    """States and adapters of jobs that leave or come back: copied, written, read."""
    start: float = 0.0
    """Loading the model, opening engines, giving jobs their slots."""

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))

    def __add__(self, other: DurationTerms) -> DurationTerms:
        return DurationTerms(
            **{field.name: getattr(self, field.name) + getattr(other, field.name) for field in dataclasses.fields(self)}
        )


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What is expected of a task's training."""

    seconds: float
    """With early exit."""
    terms: DurationTerms
    """Without early exit."""
    num_jobs: int
    waves: int
    """Turns that it takes until every job has held a slot, if all are equally long."""
    occupancy: float
    """Mean share of the token budget in use while jobs wait; 1 where none has to."""

    @property
    def seconds_without_exit(self) -> float:
        return self.terms.total


def expected_savings(preset: str, past: Sequence[float]) -> float:
    """Share of training rows that a policy saves: the mean over past tasks, and the prior while there are few."""
    prior = PRIOR_SAVINGS.get(preset, 0.0)
    return (PRIOR_TASKS * prior + sum(past)) / (PRIOR_TASKS + len(past))


def seconds_left(*, planned: float, left: float, spared: float, savings: float, rows_per_second: float) -> float:
    """Of a task that is training, at the speed so far.

    Args:
        planned: training rows of all jobs if none ended early.
        left: rows that living jobs may still train.
        spared: rows that ended jobs did not train.
        savings: share of `planned` that early exit is expected to spare in the end.
        rows_per_second: measured.
    """
    still_to_spare = max(0.0, savings * planned - spared)
    return max(0.0, left - still_to_spare) / rows_per_second


def with_early_exit(terms: DurationTerms, *, savings: float, gate_fraction: float) -> float:
    """Seconds of a task in which jobs end early: what goes by steps shrinks, what is paid once stays.

    Args:
        terms: of the task without early exit.
        savings: share of the training rows that early exit is expected to save.
        gate_fraction: of the budget before which few jobs end.
    """
    by_steps = terms.training + terms.evaluation
    return terms.total - by_steps * (1 - max(1.0 - savings, gate_fraction))
