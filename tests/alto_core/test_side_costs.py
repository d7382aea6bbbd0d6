"""Costs beside passes: what a place costs on a real tiny engine, and what is made of capture times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from alto_core.config import TuningTask
from alto_core.domain import JobBudget
from alto_core.engine.backbone import load_backbone
from alto_core.engine.capture_choice import PassKind
from alto_core.engine.engine import Engine
from alto_core.engine.passes import CaptureTime
from alto_core.preparation import plan_task
from alto_core.profiling.side_costs import capture_costs, measure_place
from alto_core.scheduling.prediction import SideCosts

BUDGET = JobBudget(total_steps=10, warmup_steps=1, eval_steps=(10,))


def test_a_place_is_measured_and_the_job_holds_it_again(tiny_task: Callable[..., TuningTask], tmp_path: Path) -> None:
    plan = plan_task(tiny_task())
    job, rows = plan.jobs[0], plan.data.train.rows[:4]
    backbone = load_backbone(plan.task.model, "cpu")
    with Engine(backbone, target_modules=job.target_modules, num_slots=1, rank_rows=4) as engine:
        engine.admit(job, BUDGET)
        engine.step({job.job_id: rows})
        costs = measure_place(engine, job, BUDGET, tmp_path)
        assert engine.job_ids == (job.job_id,)
    for name in ("admit", "restore", "leave", "write"):
        assert getattr(costs, f"{name}_seconds") > 0
    states = sum(file.stat().st_size for file in (tmp_path / "state").rglob("*.safetensors"))
    assert states / 2 < costs.state_bytes * job.rank_rows <= states


def test_settled_captures_give_the_price_and_the_first_ones_what_was_compiled() -> None:
    def capture(kind: PassKind, seconds: float, compiling: float) -> CaptureTime:
        return CaptureTime(kind=kind, tokens=1024, seconds=seconds, compile_seconds=compiling)

    costs = capture_costs(
        [
            capture(PassKind.UPDATE, 15.0, 9.0),
            capture(PassKind.UPDATE, 11.0, 9.5),
            capture(PassKind.UPDATE, 1.0, 0.0),
            capture(PassKind.UPDATE, 1.0, 0.0),
            capture(PassKind.LOSSES, 6.0, 5.0),
            capture(PassKind.LOSSES, 3.5, 3.0),
        ]
    )
    assert costs.captures
    assert (costs.capture_seconds, costs.evaluation_capture_seconds) == (pytest.approx(1.0), pytest.approx(0.5))
    assert costs.compile_seconds == pytest.approx(14 + 10 + 5.5 + 3)
    assert capture_costs([]) == SideCosts()
