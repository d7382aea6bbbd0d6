"""What a plan finds before anything runs: evaluations beyond their bound, weights that are cut."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from alto_core.config import TuningTask
from alto_core.errors import ModelError
from alto_core.preparation import create_task, plan_task
from alto_core.settings import Settings
from alto_core.store import Store


def test_evaluations_that_would_cost_too_much_come_less_often(
    tiny_task: Callable[..., TuningTask], settings: Settings
) -> None:
    budget = {"steps": 40, "eval_interval_fraction": 0.025, "max_eval_share": 0.25}
    asked = tiny_task(budget=budget)
    plan = plan_task(asked)
    assert plan.wanted_evaluation_share == pytest.approx(40 * 8 / (2 * 40 * 4), rel=0.1)
    assert plan.evaluation_share <= 0.3
    assert plan.task.budget.eval_interval_fraction == pytest.approx(0.1, rel=0.1)
    assert "budget.max_eval_share" in plan.interval_note
    create_task(plan, "tiny-1", settings)
    store = Store(settings)
    assert store.task("tiny-1").task.budget == plan.task.budget, "every stage sees the longer interval"
    assert [e.text for e in store.events("tiny-1") if e.kind == "warning"] == [plan.interval_note]


def test_evaluations_within_the_bound_stay_as_asked(tiny_task: Callable[..., TuningTask]) -> None:
    asked = tiny_task(budget={"steps": 40, "eval_interval_fraction": 0.1})
    plan = plan_task(asked)
    assert plan.task == asked
    assert plan.interval_note == ""


def test_jobs_too_short_for_fewer_evaluations_are_told_so(tiny_task: Callable[..., TuningTask]) -> None:
    plan = plan_task(tiny_task(budget={"steps": 2, "eval_interval_fraction": 0.5, "max_eval_share": 0.1}))
    assert plan.evaluation_share == plan.wanted_evaluation_share > 0.1
    assert "jobs this short cannot have fewer: train longer" in plan.interval_note


def test_a_length_beyond_the_model_is_told(tiny_task: Callable[..., TuningTask]) -> None:
    data = tiny_task().data.model_dump(exclude_none=True) | {"max_length": 100_000}
    notes = plan_task(tiny_task(data=data)).data.report.notes
    assert any("tokens, not 100000: the model has no more positions" in note for note in notes), notes


def test_a_model_without_a_tokenizer_is_told_by_the_file(
    tiny_task: Callable[..., TuningTask], tiny_model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    for file in folder.glob("*token*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"the folder holds no tokenizer\.json\. Expected a folder with config\.json"):
        plan_task(tiny_task(model={"name": str(folder)}))


def test_a_model_with_weights_that_are_cut_is_refused_before_any_device_is_taken(
    tiny_task: Callable[..., TuningTask], tiny_model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors: expected whole safetensors"):
        plan_task(tiny_task(model={"name": str(folder)}))
