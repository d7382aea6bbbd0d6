"""How many steps a job trains, when it is evaluated, which rows each step takes. Pure functions of the step number.

Row order has no state: `rows_of_step` gives the rows of any step, so a resumed job sees what it would have seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from alto_core.config import BudgetSection
from alto_core.domain import JobBudget, LoraJob


def job_budget(job: LoraJob, budget: BudgetSection, num_train_rows: int) -> JobBudget:
    """Steps of one job: passes over the rows, the last short batch of an epoch included, and at least one step."""
    if budget.steps is not None:
        total = budget.steps
    else:
        assert budget.epochs is not None
        total = max(1, math.ceil(budget.epochs * steps_per_epoch(job, num_train_rows) - 1e-9))
    interval = max(1, round(budget.eval_interval_fraction * total))
    gate = min(total, max(1, round(budget.gate_warmup_fraction * total)))
    evals = sorted({*range(interval, total, interval), gate, total})
    return JobBudget(total_steps=total, warmup_steps=gate, eval_steps=tuple(evals))


def evaluation_share(
    jobs: Sequence[LoraJob],
    budgets: Mapping[str, JobBudget],
    *,
    num_train_rows: int,
    train_tokens: int,
    validation_tokens: int,
) -> float:
    """What all evaluations cost, as a share of what all training costs if no job ends early.

    Counted in tokens, a trained one twice: the frozen model needs no gradient of its weights, so a step is one forward
    and one backward pass of about the same cost.

    Args:
        train_tokens: of all training rows together.
        validation_tokens: of all validation rows together.
    """
    evaluated = sum(len(budgets[job.job_id].eval_steps) for job in jobs) * validation_tokens
    rows = sum(num_samples(job, budgets[job.job_id].total_steps, num_train_rows) for job in jobs)
    return evaluated / (2 * rows * train_tokens / num_train_rows)


def steps_per_epoch(job: LoraJob, num_train_rows: int) -> int:
    return math.ceil(num_train_rows / job.rows_per_update)


def num_samples(job: LoraJob, steps: int, num_train_rows: int) -> int:
    """Rows that a job has trained on after so many steps, repetitions counted; an epoch's last batch may be short."""
    epochs, rest = divmod(steps, steps_per_epoch(job, num_train_rows))
    return epochs * num_train_rows + rest * job.rows_per_update


def rows_of_step(*, step: int, num_train_rows: int, rows_per_update: int, seed: int) -> tuple[int, ...]:
    """Indices of the training rows of one optimizer step.

    Args:
        step: 1-based.
        num_train_rows: rows of the training split.
        rows_per_update: adapter batch size times gradient accumulation.
        seed: the data set's seed; jobs of a task share it, so equal batch sizes mean equal batches.

    Returns:
        `rows_per_update` indices into the training split; fewer for the last step of an epoch.
    """
    per_epoch = math.ceil(num_train_rows / rows_per_update)
    epoch, position = divmod(step - 1, per_epoch)
    start = position * rows_per_update
    return _epoch_order(num_train_rows, seed, epoch)[start : start + rows_per_update]


@lru_cache(maxsize=8)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = np.random.default_rng([seed, epoch]).permutation(num_rows)
    return tuple(int(i) for i in order)
