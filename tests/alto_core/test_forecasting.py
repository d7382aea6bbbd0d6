"""The forecast against the executor and the engine themselves: the same rounds and passes; and what each costs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from alto_core.config import TuningTask
from alto_core.engine.backbone import load_backbone
from alto_core.engine.engine import Engine
from alto_core.engine.passes import PassRunner, PassWork
from alto_core.engine.step import JointStepper
from alto_core.executor import Executor
from alto_core.job_run import JobRun
from alto_core.preparation import TaskPlan, plan_task
from alto_core.profiling import TaskAhead, forecast_task, shape_of_model
from alto_core.profiling.forecasting import _stretches
from alto_core.profiling.passes_ahead import EngineAhead
from alto_core.scheduling.intra_task import Capacity, PackingPlan
from alto_core.scheduling.playing import play
from alto_core.scheduling.prediction import DurationTerms, PassSpeed, SideCosts

NUM_SLOTS, MAX_PASS_TOKENS = 3, 90
PER_TOKEN = PassSpeed(base_seconds=0.0, seconds_per_token=1.0, eval_share=0.5)


@pytest.fixture
def plan(tiny_task: Callable[..., TuningTask]) -> TaskPlan:
    space = {
        "learning_rate": [1e-3, 1e-2],
        "lora_rank": [2, 4],
        "adapter_batch_size": [2, 4],
        "gradient_accumulation": 2,
    }
    return plan_task(tiny_task(search_space=space, budget={"epochs": 1, "eval_interval_fraction": 0.4}))


def ahead_of(plan: TaskPlan, **fields: Any) -> TaskAhead:
    capacity = Capacity(num_slots=NUM_SLOTS, rank_rows=4 * NUM_SLOTS, step_tokens=1e6)
    known = {
        "data": plan.data,
        "data_seed": 0,
        "jobs": plan.jobs,
        "budgets": plan.budgets,
        "plan": PackingPlan(capacity=capacity, max_pass_tokens=MAX_PASS_TOKENS, peak_bytes=0, too_large=()),
        "shape": shape_of_model(plan.task.model, plan.jobs[0].target_modules, on_gpu=False),
    }
    return TaskAhead(**{**known, **fields})


def terms(ahead: TaskAhead, speed: PassSpeed = PER_TOKEN, **costs: Any) -> DurationTerms:
    return forecast_task(ahead, speed, SideCosts(**costs), savings=0.0, gate_fraction=0.0).terms


def test_rounds_and_passes_are_those_of_the_executor_and_the_engine(
    plan: TaskPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[set[str]] = []
    passes: list[tuple[bool, int, int]] = []
    step, run = JointStepper.step, PassRunner.run

    def noted_step(stepper: JointStepper, jobs: Any, rows: Any) -> None:
        steps.append({active.job.job_id for active in jobs})
        step(stepper, jobs, rows)

    def noted_run(runner: PassRunner, kind: Any, work: PassWork) -> Any:
        passes.append((kind.value == "losses", work.batch.num_tokens, len(work.batch.label_ids_P)))
        return run(runner, kind, work)

    monkeypatch.setattr(JointStepper, "step", noted_step)
    monkeypatch.setattr(PassRunner, "run", noted_run)
    runs = [
        JobRun(
            job=job,
            budget=plan.budgets[job.job_id],
            folder=tmp_path / job.job_id,
            start_step=0,
            target_step=plan.budgets[job.job_id].total_steps,
        )
        for job in plan.jobs
    ]
    with Engine(
        load_backbone(plan.task.model, "cpu"),
        target_modules=plan.jobs[0].target_modules,
        num_slots=NUM_SLOTS,
        rank_rows=4 * NUM_SLOTS,
        max_pass_tokens=MAX_PASS_TOKENS,
    ) as engine:
        session = Executor(engine, plan.data, data_seed=0).run(runs)
        next(session)
        with contextlib.suppress(StopIteration):
            while True:
                session.send(())

    ahead = ahead_of(plan)
    (works,) = _stretches(ahead)
    rounds = list(play(works, ahead.plan.capacity))
    played = [set(one.steps_made) for one in rounds for _ in range(one.num_steps)]
    assert sorted(map(sorted, played)) == sorted(map(sorted, steps))
    found = [one for one in passes if not one[0]]
    assert len(found) > len(steps), "some steps take several passes"
    engine_ahead = EngineAhead(
        plan.data,
        {job.job_id: job for job in plan.jobs},
        data_seed=0,
        num_slots=NUM_SLOTS,
        max_pass_tokens=MAX_PASS_TOKENS,
        num_parameters=1,
        captures=False,
    )
    expected = [
        one.tokens
        for play_round in rounds
        for offset in range(play_round.num_steps)
        for one in engine_ahead.step({job_id: step + offset for job_id, step in play_round.steps_made.items()})
    ]
    assert sorted(expected) == sorted(tokens for _, tokens, _ in found)
    evaluated = [one.tokens for play_round in rounds for one in engine_ahead.evaluation(len(play_round.due))]
    assert sorted(evaluated) == sorted(tokens for is_evaluation, tokens, _ in passes if is_evaluation)


def test_every_token_has_its_price_and_gates_change_nothing_but_engines(plan: TaskPlan) -> None:
    rows = [len(row.token_ids) for row in plan.data.train.rows]
    whole = terms(ahead_of(plan))
    assert whole.training == pytest.approx(sum(rows) * len(plan.jobs)), "an epoch"
    held_out = sum(len(row.token_ids) for row in plan.data.validation.rows)
    num_evaluations = sum(len(budget.eval_steps) for budget in plan.budgets.values())
    assert whole.evaluation == pytest.approx(0.5 * held_out * num_evaluations)
    gated = terms(ahead_of(plan, gates=(0.4,)), engine_seconds=7.0)
    assert gated.training == pytest.approx(whole.training)
    assert (gated.start, terms(ahead_of(plan), engine_seconds=7.0).start) == (14.0, 7.0)


def test_captures_are_counted_and_fill_passes_up(plan: TaskPlan) -> None:
    one_second = {"captures": True, "capture_seconds": 1.0, "evaluation_capture_seconds": 1.0}
    captured, uncaptured = terms(ahead_of(plan), **one_second), terms(ahead_of(plan))
    assert captured.captures == round(captured.captures) >= 2
    assert captured.training > uncaptured.training
    gated = terms(ahead_of(plan, gates=(0.4,)), **one_second)
    assert captured.captures < gated.captures <= 2 * captured.captures


def test_states_that_are_not_yet_written_hold_up_the_end(plan: TaskPlan) -> None:
    rank_rows = sum(job.rank_rows for job in plan.jobs)
    assert terms(ahead_of(plan), leave_seconds=1.0).checkpoints == pytest.approx(rank_rows)
    assert terms(ahead_of(plan), admit_seconds=1.0).start == pytest.approx(rank_rows)
    gated = terms(ahead_of(plan, gates=(0.4,)), restore_seconds=1.0)
    assert gated.checkpoints == pytest.approx(rank_rows), "each job comes back once"
    quick, slow = (terms(ahead_of(plan), write_seconds=seconds).checkpoints for seconds in (1e-6, 1e9))
    assert quick < 1e-6 * rank_rows, "written while others trained, but for the last"
    assert slow == pytest.approx(1e9 * rank_rows, rel=1e-3)


def test_two_ranks_train_at_once(plan: TaskPlan) -> None:
    alone, together = terms(ahead_of(plan)), terms(ahead_of(plan, num_ranks=2))
    assert alone.training / 2 < together.training < alone.training


def test_a_long_task_is_forecast_from_a_part_of_its_steps(plan: TaskPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: Mapping[str, Any] = {
        job_id: dataclasses.replace(budget, total_steps=400, eval_steps=(400,))
        for job_id, budget in plan.budgets.items()
    }
    whole = terms(ahead_of(plan, budgets=budgets))
    monkeypatch.setattr("alto_core.profiling.forecasting.MAX_PLAYED_STEPS", 100)
    assert terms(ahead_of(plan, budgets=budgets)).training == pytest.approx(whole.training, rel=0.05)
