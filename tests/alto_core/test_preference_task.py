"""A task with `objective: dpo` through its stages: one reference for all jobs, what MLflow shows, who wins."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from alto_core.config import TuningTask
from alto_core.engine.engine import UNTUNED, Engine
from alto_core.engine.ranks import release_ranks
from alto_core.preflight import profile_task
from alto_core.preparation import create_task, plan_task
from alto_core.profiling import Layout, PackingQuestion
from alto_core.selection import evaluate_task
from alto_core.settings import Settings, load_settings
from alto_core.task_engine import open_engine
from alto_core.training import decide_gate, train_until
from alto_core.workspace import Workspace


@pytest.fixture(scope="session")
def tiny_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs that a tiny model can learn: the letter again, not a mark."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [
        {"prompt": f"{chr(97 + i % 26)}{i // 26}:", "chosen": chr(97 + i % 26) * 3, "rejected": "#"} for i in range(64)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.fixture
def dpo_task(tiny_task: Callable[..., TuningTask], tiny_pairs: Path) -> Callable[..., TuningTask]:
    """Makes a small task over pairs; sections given replace the default ones."""

    def make(**sections: Any) -> TuningTask:
        fields = {
            "objective": "dpo",
            "dpo": {"beta": [0.1, 0.5]},
            "data": {"source": str(tiny_pairs), "validation": {"rows": 8}, "test": {"rows": 16}},
            "search_space": {"learning_rate": [1e-5, 1e-2], "lora_rank": 4, "adapter_batch_size": 4},
            "budget": {"steps": 12, "eval_interval_fraction": 0.25, "gate_warmup_fraction": 0.25},
            "evaluation": {},
        }
        return tiny_task(**{**fields, **sections})

    return make


def open_task(task: TuningTask, task_id: str) -> Workspace:
    create_task(plan_task(task), task_id, load_settings())
    return Workspace.open(task_id)


@pytest.fixture
def home(embedded: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("ALTO_HOME", str(embedded.home))
    monkeypatch.setenv("ALTO_DEVICE", "cpu")
    return embedded


def count_reference_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pairs of each call that measures the reference."""
    counts: list[int] = []
    measure = Engine.side_losses

    def counted(self: Engine, job_id: str, rows: Any, **options: Any) -> Any:
        counts.append(len(rows))
        return measure(self, job_id, rows, **options)

    monkeypatch.setattr(Engine, "side_losses", counted)
    return counts


def test_a_task_over_pairs_from_profile_to_winner(
    home: Settings, dpo_task: Callable[..., TuningTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = count_reference_passes(monkeypatch)
    workspace = open_task(dpo_task(early_exit={"preset": "none"}), "prefers")
    assert len(workspace.jobs) == 4
    assert {job.beta for job in workspace.jobs.values()} == {0.1, 0.5}
    slots = profile_task(workspace)[0].num_slots
    train_until(workspace, 0.25, num_slots=slots)
    decide_gate(workspace, 0.25)
    train_until(Workspace.open("prefers"), 1.0, num_slots=slots)  # as another process would go on
    winner, scores = evaluate_task(Workspace.open("prefers"), num_slots=slots)

    # Every pair that is trained or held out, once, for four jobs, several epochs of stages and the evaluation.
    assert sum(counts) == 40 + 8 + 16
    assert len(list((home.home / "references").iterdir())) == 1
    assert workspace.jobs[winner].learning_rate == 1e-2
    by_id = {(score.job_id, score.split): score for score in scores}
    tuned, untuned = by_id[winner, "test"], by_id[None, "test"]
    assert (tuned.metric, untuned.metric) == ("preference", "preference")
    assert untuned.metric_value and untuned.metric_value.value == 0.5
    assert tuned.metric_value and tuned.metric_value.low > 0.5
    assert untuned.loss == pytest.approx(math.log(2))

    with workspace.tracked() as runs:
        run_id = runs.job_run_ids[winner]
        curves = runs.read_curves()
    for curve in curves.values():
        assert curve.train_losses[0] == pytest.approx(math.log(2), abs=1e-5)
    run = MlflowClient(home.mlflow_tracking_uri).get_run(run_id)
    for name in ("accuracy", "accuracy_low", "accuracy_high", "likelihood_accuracy", "margin", "chosen_reward"):
        assert f"val_{name}" in run.data.metrics
    assert run.data.metrics["val_accuracy_low"] <= run.data.metrics["val_accuracy"]
    assert run.data.metrics["train_margin"] > 0
    assert run.data.params["beta"] == str(workspace.jobs[winner].beta)
    assert any(event.kind == "reference" for event in workspace.store.events("prefers"))


def test_another_task_on_the_same_pairs_finds_the_reference(
    home: Settings, dpo_task: Callable[..., TuningTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = count_reference_passes(monkeypatch)
    short = {"steps": 2, "eval_interval_fraction": 1.0, "gate_warmup_fraction": 0.5}
    for task_id, budget in (("short", short), ("long", {**short, "steps": 4}), ("again", short)):
        workspace = open_task(dpo_task(budget=budget), task_id)
        open_engine(workspace, list(workspace.jobs), num_slots=2).close()
    # Held-out pairs and two steps of four; two more steps; nothing.
    assert counts == [8 + 16 + 8, 8]


def test_a_start_adapter_is_the_reference(home: Settings, dpo_task: Callable[..., TuningTask], tmp_path: Path) -> None:
    first = open_task(dpo_task(), "first")
    job_id, job = next(item for item in first.jobs.items() if item[1].learning_rate == 1e-2)
    with open_engine(first, [job_id], num_slots=1) as engine:
        engine.admit(job, first.budgets[job_id])
        for step in range(8):
            engine.step({job_id: first.data.train.rows[step * 4 : step * 4 + 4]})
        engine.export(job_id, tmp_path / "start", best=False)
        begun = engine.side_losses(job_id, first.data.validation.rows, max_tokens=4096)

    second = open_task(dpo_task(init_adapter=str(tmp_path / "start")), "second")
    job_id, job = next(iter(second.jobs.items()))
    with open_engine(second, [job_id], num_slots=1) as engine:
        engine.admit(job, second.budgets[job_id], init_adapter=tmp_path / "start")
        engine.step({job_id: second.data.train.rows[:4]})
        (record,) = engine.take_records()
        untuned = engine.evaluate([UNTUNED], second.data.validation.rows, max_tokens=4096)[UNTUNED]
    assert second.references is not None and first.references is not None
    for row, sums in zip(first.data.validation.rows, begun, strict=True):
        assert second.references.by_row[row.row_id] == pytest.approx(tuple(sums), abs=1e-4)
        assert second.references.by_row[row.row_id] != pytest.approx(first.references.by_row[row.row_id], abs=0.1)
    assert record.train_loss == pytest.approx(math.log(2), abs=1e-5)
    assert record.measures["train_margin"] == pytest.approx(0.0, abs=1e-4)
    # What the adapter had learned counts against the model without it.
    assert untuned.mean > math.log(2)


@pytest.mark.xdist_group("ranks")
def test_ranks_have_the_reference_that_one_of_them_measured(
    home: Settings, dpo_task: Callable[..., TuningTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = open_task(dpo_task(), "alone")
    open_engine(alone, list(alone.jobs), num_slots=1).close()
    (home.home / "references" / next((home.home / "references").iterdir()).name).unlink()
    workspace = open_task(dpo_task(cluster={"num_gpus": 2}), "parallel")
    monkeypatch.setattr(PackingQuestion, "choose_layout", lambda *_, **__: Layout(num_ranks=2, sharded=True))
    try:
        profile_task(workspace)
        jobs = list(workspace.jobs.values())
        with open_engine(workspace, list(workspace.jobs), num_slots=4) as engine:
            for job in jobs:
                engine.admit(job, workspace.budgets[job.job_id])
            engine.step({job.job_id: workspace.data.train.rows[:4] for job in jobs})
            records = engine.take_records()
    finally:
        release_ranks()
    assert [record.train_loss for record in records] == pytest.approx([math.log(2)] * 4, abs=1e-5)
    assert workspace.references is not None and alone.references is not None
    assert workspace.references.by_row.keys() == alone.references.by_row.keys()
    for row_id, sums in alone.references.by_row.items():
        assert workspace.references.by_row[row_id] == pytest.approx(sums, abs=1e-4)


def test_a_reference_file_that_is_damaged_is_measured_again(
    home: Settings, dpo_task: Callable[..., TuningTask]
) -> None:
    workspace = open_task(dpo_task(), "damaged")
    open_engine(workspace, list(workspace.jobs), num_slots=1).close()
    assert workspace.references is not None
    (file,) = (home.home / "references").iterdir()
    file.write_bytes(b"PAR1")
    again = Workspace.open("damaged")
    open_engine(again, list(again.jobs), num_slots=1).close()
    assert again.references is not None
    assert again.references.by_row == workspace.references.by_row
    assert file.stat().st_size > 4
