"""A report from a real store and a real MLflow."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from alto_core.config import TuningTask, parse_task
from alto_core.domain import Evaluation, JobBudget, JobState, RowLosses, Stage, StepRecord, TaskState
from alto_core.errors import StoreError
from alto_core.report import ReportData, build_report
from alto_core.report.load import load_report
from alto_core.settings import Settings
from alto_core.store import EventDraft, JobUpdate, Store
from alto_core.tracking import DatasetSummary, Tracker


@pytest.fixture
def task(tmp_path: Path) -> TuningTask:
    return parse_task(
        {
            "name": "made",
            "owner": "me",
            "model": {"name": str(tmp_path / "tiny")},
            "data": {"source": str(tmp_path / "train.jsonl")},
            "search_space": {"learning_rate": 1e-3, "lora_rank": 8},
            "budget": {"steps": 40},
        }
    )


@pytest.fixture
def recorded(settings: Settings, task: TuningTask, report_data: ReportData) -> str:
    """The made-up task, written to the store and to MLflow as a flow writes it."""
    store, jobs = Store(settings), [row.job for row in report_data.jobs]
    task_id = store.new_task_id(task.name)
    budgets = {job.job_id: JobBudget(total_steps=40, warmup_steps=4, eval_steps=(4, 40)) for job in jobs}
    store.add_task(task_id, task, jobs, budgets)
    store.start_task(task_id)
    store.set_stage(task_id, Stage.WARMUP)
    summary = DatasetSummary(
        name="train.jsonl", source="train.jsonl", digest="d", num_train=320, num_validation=32, num_test=0, num_tokens=9
    )
    runs = Tracker(settings).open_task(task, task_id, jobs, summary)
    for job_id, curve in report_data.curves.items():
        runs.log_steps(
            [
                StepRecord(job_id=job_id, step=s, train_loss=v, learning_rate=1e-3, grad_norm=1.0, num_tokens=8)
                for s, v in zip(curve.train_steps, curve.train_losses, strict=True)
            ]
        )
        runs.log_evaluations(
            [
                Evaluation(
                    job_id=job_id, step=s, fraction=s / 40, row_losses=RowLosses(loss_sums=(v,), num_labels=(1,))
                )
                for s, v in zip(curve.val_steps, curve.val_losses, strict=True)
            ]
        )
    runs.flush()
    updates = [
        JobUpdate(
            job_id=row.job_id,
            state=row.state,
            step=row.step,
            reason=row.reason,
            best_val_loss=row.best_val_loss,
            best_step=row.best_step,
        )
        for row in report_data.jobs
    ]
    store.update_jobs(task_id, updates)
    store.set_task_fields(task_id, parent_run_id=runs.parent_run_id, result=report_data.result.to_dict())
    exits = [
        EventDraft(kind="exit", job_id=row.job_id, text=f"{row.state}: {row.reason}", numbers={"step": row.step})
        for row in report_data.jobs
    ]
    progress = [EventDraft(kind="progress", text="", numbers={"tokens_per_second": speed}) for speed in (1, 187, 900)]
    stage = EventDraft(kind="stage", text=Stage.WARMUP)
    forecast = EventDraft(kind="forecast", text="about 3 min 05 s, 4 jobs in 1 wave")
    store.append_events(
        task_id, [stage, forecast, *exits, *progress, EventDraft(kind="warning", text="the disk is nearly full")]
    )
    store.end_task(task_id, TaskState.FINISHED)
    runs.close(TaskState.FINISHED)
    return task_id


def test_what_was_recorded_comes_back(settings: Settings, recorded: str, report_data: ReportData) -> None:
    data = load_report(recorded, settings)
    assert data.jobs == tuple(
        dataclasses.replace(row, train_loss=None, val_loss=None, gate_rank=None) for row in report_data.jobs
    )
    assert data.result == report_data.result
    for job_id, curve in report_data.curves.items():
        read = data.curves[job_id]
        assert read.train_steps == curve.train_steps
        assert read.val_losses == pytest.approx(curve.val_losses, nan_ok=True)
        assert math.isnan(read.train_losses[-1]) == math.isnan(curve.train_losses[-1])
    assert data.tokens_per_second == 187
    assert data.warnings == ("the disk is nearly full",)
    assert [stage.stage for stage in data.stages] == ["warmup"]
    assert {end.job_id for end in data.exits} == set(report_data.curves)
    assert data.facts.model == "tiny"

    path = build_report(recorded, settings)
    assert path == settings.task_folder(recorded) / "report.html"
    page = path.read_text(encoding="utf-8")
    assert page.count('class="job fate-') == 2 * len(report_data.jobs)
    assert "the disk is nearly full" in page and "about 3 min 05 s, 4 jobs in 1 wave" in page


def test_an_unknown_task_is_a_store_error(settings: Settings) -> None:
    with pytest.raises(StoreError, match="made-7"):
        build_report("made-7", settings)


def test_every_end_state_of_the_made_task_is_covered(report_data: ReportData) -> None:
    assert {row.state for row in report_data.jobs} == {state for state in JobState if state.is_end}
