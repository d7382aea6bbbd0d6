"""How long a task will take: its jobs played through the slots, at the speed that was measured or that a GPU promises.

Without early exit every job trains its whole budget. With it the training after the gate shrinks by what the policy
saved in past tasks.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from alto_core.scheduling.intra_task import Capacity, JobSize, admit

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

    def evaluation_seconds(self, tokens: float) -> float:
        return self.eval_share * self.seconds_per_token * tokens

    def on_ranks(self, num_ranks: int) -> PassSpeed:
        """Of as many passes side by side, counted as one."""
        return dataclasses.replace(self, seconds_per_token=self.seconds_per_token / num_ranks)


def fit_speed(measured: Sequence[tuple[float, float]], *, eval_share: float = 1 / 3) -> PassSpeed:
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
    return PassSpeed(base_seconds=max(0.0, mean_y - slope * mean_x), seconds_per_token=slope, eval_share=eval_share)


@dataclass(frozen=True, kw_only=True)
class JobWork:
    """What a job has still to do."""

    size: JobSize
    steps: int
    evaluations: int
    tokens_per_step: float
    """Of an update, all its micro batches."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What is expected of a task's training."""

    seconds: float
    """With early exit."""
    seconds_without_exit: float
    num_jobs: int
    waves: int
    """Turns that it takes until every job has held a slot, if all are equally long."""
    occupancy: float
    """Mean share of the token budget in use while jobs wait; 1 where none has to."""


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


def forecast(
    works: Sequence[JobWork],
    capacity: Capacity,
    speed: PassSpeed,
    *,
    max_pass_tokens: int,
    validation_tokens: int,
    savings: float,
    gate_fraction: float,
) -> Forecast:
    """Play the jobs through the slots.

    Args:
        works: of all jobs.
        capacity: room for jobs side by side.
        speed: of passes.
        max_pass_tokens: of one.
        validation_tokens: of one job's evaluation.
        savings: share of the training rows that early exit is expected to save.
        gate_fraction: of the budget before which few jobs end.
    """
    training, first_wave, occupancy = _play(works, capacity, speed, max_pass_tokens)
    evaluation = sum(work.evaluations for work in works) * speed.evaluation_seconds(validation_tokens)
    whole = training + evaluation
    kept = max(1.0 - savings, gate_fraction)
    return Forecast(
        seconds=whole * kept,
        seconds_without_exit=whole,
        num_jobs=len(works),
        waves=math.ceil(len(works) / max(1, first_wave)),
        occupancy=occupancy,
    )


def _play(
    works: Sequence[JobWork], capacity: Capacity, speed: PassSpeed, max_pass_tokens: int
) -> tuple[float, int, float]:
    """Seconds of all steps, jobs in slots at the beginning, and mean occupancy while jobs wait.

    From one job's end to the next all steps are alike, so it takes as many rounds as there are jobs.
    """
    by_id = {work.size.job_id: work for work in works}
    waiting = {job_id: work.size for job_id, work in by_id.items()}
    ends: list[tuple[int, str]] = []
    running: dict[str, JobSize] = {}
    seconds = used = available = 0.0
    step, first_wave, freed = 0, 0, None
    while waiting or running:
        for size in admit(waiting.values(), tuple(running.values()), capacity, freed):
            running[size.job_id] = waiting.pop(size.job_id)
            heapq.heappush(ends, (step + by_id[size.job_id].steps, size.job_id))
        if not running:
            break  # what is left fits in no way
        first_wave = first_wave or len(running)
        end, job_id = heapq.heappop(ends)
        tokens = sum(by_id[running_id].tokens_per_step for running_id in running)
        round_seconds = (end - step) * speed.step_seconds(tokens, max_pass_tokens)
        seconds += round_seconds
        if waiting:
            used += round_seconds * capacity.occupancy(running.values())
            available += round_seconds
        step, freed = end, running.pop(job_id)
    return seconds, first_wave, used / available if available else 1.0
