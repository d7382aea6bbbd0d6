"""A task whose jobs are variants of LoRA through its stages: one measurement for all, a winner that PEFT loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from alto_core import layer_measures
from alto_core.config import TuningTask
from alto_core.errors import TaskFileError
from alto_core.preflight import profile_task
from alto_core.preparation import create_task, plan_task
from alto_core.selection import evaluate_task
from alto_core.settings import Settings, load_settings
from alto_core.task_engine import task_measures
from alto_core.training import train_until
from alto_core.workspace import Workspace

PROBED = {"probe": {"share": 0.5, "allocation": "proportional"}}


@pytest.fixture
def home(embedded: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("ALTO_HOME", str(embedded.home))
    monkeypatch.setenv("ALTO_DEVICE", "cpu")
    return embedded


@pytest.fixture
def variants_task(tiny_task: Callable[..., TuningTask]) -> Callable[..., TuningTask]:
    """Makes a small task with a listed job of each variant; fields given change all its jobs."""

    def make(*, init_adapter: str | None = None, jobs: list[dict[str, Any]] | None = None) -> TuningTask:
        common = {"learning_rate": 1e-2, "lora_rank": 2, "adapter_batch_size": 4}
        listed = jobs or [
            {},
            {"layers": PROBED},
            {"init": "pissa", "lora_plus_ratio": 4.0},
            {"init": "tlora", "train": "b_only", "rank_allocation": "sensitivity"},
        ]
        return tiny_task(
            search_space={"jobs": [common | job for job in listed]},
            budget={"steps": 6, "eval_interval_fraction": 0.5, "gate_warmup_fraction": 0.5},
            early_exit={"preset": "none"},
            evaluation={},
            **({} if init_adapter is None else {"init_adapter": init_adapter}),
        )

    return make


def open_task(task: TuningTask, task_id: str) -> Workspace:
    create_task(plan_task(task), task_id, load_settings())
    return Workspace.open(task_id)


def count_measurements(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each pass that measures layers."""
    counts: list[int] = []
    measure = layer_measures.measure_layers

    def counted(engine: Any, model: Any, names: Any, rows: Any, **options: Any) -> Any:
        counts.append(len(rows))
        return measure(engine, model, names, rows, **options)

    monkeypatch.setattr(layer_measures, "measure_layers", counted)
    return counts


def test_variants_from_profile_to_winner(
    home: Settings, variants_task: Callable[..., TuningTask], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counts = count_measurements(monkeypatch)
    workspace = open_task(variants_task(), "varied")
    slots = profile_task(workspace)[0].num_slots
    train_until(workspace, 0.5, num_slots=slots)
    train_until(Workspace.open("varied"), 1.0, num_slots=slots)  # as another process would go on
    winner, scores = evaluate_task(Workspace.open("varied"), num_slots=slots)

    assert len(counts) == 1 and counts[0] > 1, "for four jobs, two stages and the evaluation"
    (event,) = [event for event in workspace.store.events("varied") if event.kind == "layers"]
    assert "14 layers" in event.text and "model.layers." in event.text
    with workspace.tracked() as runs:
        curves = runs.read_curves()
    assert all(curve.val_losses[-1] < curve.val_losses[0] for curve in curves.values()), "every variant learns"
    on_test = {score.job_id: score.loss for score in scores if score.split == "test"}
    assert on_test[winner] < on_test[None]
    base = transformers.AutoModelForCausalLM.from_pretrained(workspace.task.model.name)
    for job_id, job in workspace.jobs.items():
        folder = workspace.job_folder(job_id) / "adapter"
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["r"] == job.rank_rows
        assert (len(config["target_modules"]) == 7) == (job.layer_share in (0.5, 1.0))
        tuned = peft.PeftModel.from_pretrained(base, folder)
        with torch.no_grad():
            assert tuned(torch.tensor([[5, 6, 7]])).logits.isfinite().all()
        base = tuned.unload()

    measures = task_measures(workspace)
    # Another task with the same rows and model, and a damaged file.
    other = open_task(variants_task(jobs=[{"init": "tlora", "train": "b_only", "rank_allocation": "sensitivity"}]), "b")
    assert task_measures(other).keys() == measures.keys()
    assert len(counts) == 1
    (file,) = (home.home / "layers").iterdir()
    file.write_bytes(file.read_bytes()[:100])
    again = task_measures(Workspace.open("varied"))
    assert len(counts) == 2
    assert all(torch.equal(m.directions_kI, measures[name].directions_kI) for name, m in again.items())


def test_jobs_that_are_measured_first_train_on_one_gpu(
    variants_task: Callable[..., TuningTask],
) -> None:
    task = variants_task(jobs=[{}, {"layers": PROBED}])
    several = task.model_copy(update={"cluster": task.cluster.model_copy(update={"num_gpus": 2})})
    with pytest.raises(TaskFileError, match=r"cluster\.num_gpus: got 2, expected 1 with jobs such as"):
        plan_task(several)


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"init": "pissa"}, "init"), ({"layers": PROBED}, "layers"), ({"rank_allocation": "sensitivity"}, "rank_alloc")],
)
def test_a_start_adapter_leaves_nothing_to_choose(
    home: Settings, variants_task: Callable[..., TuningTask], tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2}))
    with pytest.raises(TaskFileError, match=rf"search_space\.{field}.*beside an `init_adapter`"):
        plan_task(variants_task(init_adapter=str(tmp_path), jobs=[changes]))
    shutil.rmtree(tmp_path)
