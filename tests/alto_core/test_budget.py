"""Steps, evaluation points and row order of a job."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto_core.budget import evaluation_share, job_budget, num_samples, rows_of_step, steps_per_epoch
from alto_core.config import BudgetSection
from alto_core.domain import LoraJob


def make_job(batch: int = 4, accumulation: int = 1) -> LoraJob:
    return LoraJob(
        learning_rate=1e-4,
        lora_rank=8,
        lora_alpha=16,
        adapter_batch_size=batch,
        gradient_accumulation=accumulation,
        target_modules=("q_proj",),
    )


@pytest.mark.parametrize(
    ("rows", "batch", "epochs", "steps"),
    [(320, 8, 1, 40), (321, 8, 1, 41), (1, 4, 1, 1), (3, 4, 2, 2), (10, 4, 0.5, 2)],
)
def test_epochs_become_whole_steps_and_at_least_one(rows: int, batch: int, epochs: float, steps: int) -> None:
    assert job_budget(make_job(batch), BudgetSection(epochs=epochs), rows).total_steps == steps


def test_gate_and_end_are_evaluation_steps() -> None:
    budget = job_budget(make_job(), BudgetSection(steps=100, eval_interval_fraction=0.03), 1000)
    assert budget.warmup_steps == 5
    assert {budget.warmup_steps, budget.total_steps} <= set(budget.eval_steps)
    assert list(budget.eval_steps) == sorted(budget.eval_steps)
    assert budget.step_at(0.2) == 20
    assert budget.step_at(1e-9) == 1


def test_accumulation_counts_as_a_larger_batch() -> None:
    assert steps_per_epoch(make_job(2, 4), 320) == steps_per_epoch(make_job(8), 320) == 40


@given(rows=st.integers(1, 60), batch=st.integers(1, 16), epochs=st.integers(1, 3), seed=st.integers(0, 5))
def test_every_epoch_sees_each_row_once(rows: int, batch: int, epochs: int, seed: int) -> None:
    job = make_job(batch)
    steps = epochs * steps_per_epoch(job, rows)
    seen: Counter[int] = Counter()
    for step in range(1, steps + 1):
        taken = rows_of_step(step=step, num_train_rows=rows, rows_per_update=batch, seed=seed)
        seen.update(taken)
        assert taken
    assert seen == Counter(dict.fromkeys(range(rows), epochs))
    assert num_samples(job, steps, rows) == rows * epochs


def test_order_differs_between_epochs_and_seeds_and_not_between_calls() -> None:
    def epoch(number: int, seed: int) -> tuple[int, ...]:
        return rows_of_step(step=number, num_train_rows=50, rows_per_update=50, seed=seed)

    assert epoch(1, 0) == epoch(1, 0)
    assert len({epoch(1, 0), epoch(2, 0), epoch(1, 1)}) == 3


def test_the_cost_of_evaluations_by_hand() -> None:
    """Two jobs of 100 evaluations on 50 tokens each, 3 epochs of 1000 trained tokens each, which count twice."""
    jobs = [make_job(2), make_job(1)]
    section = BudgetSection(epochs=3, eval_interval_fraction=0.01)
    budgets = {job.job_id: job_budget(job, section, 200) for job in jobs}
    share = evaluation_share(jobs, budgets, num_train_rows=200, train_tokens=1000, validation_tokens=50)
    assert share == pytest.approx(2 * 100 * 50 / (2 * 2 * 3 * 1000))
