"""A workspace whose store holds a made-up task, and the command line on top of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from alto_core.config import TuningTask, parse_task
from alto_core.domain import GateEntry, JobBudget, JobState, LoraJob, Stage, TaskState
from alto_core.outcomes import Interval, Score
from alto_core.result import GateRecord, RegisteredVersion, TaskResult
from alto_core.settings import Settings
from alto_core.store import EventDraft, JobUpdate, Store
from alto_core.task_lock import held
from flows.cli.app import app

ENDS = (
    (1e-3, JobState.FINISHED, 40, 0.41, "budget spent"),
    (2e-3, JobState.OVERFITTING, 24, 0.52, "the gap 0.34 is above 0.1"),
    (1e-4, JobState.UNDERPERFORMING, 4, 1.9, "place 3 of 3 at the gate"),
    (2e-2, JobState.DIVERGING, 3, None, "the [red]train[/red] loss is nan"),
)
Invoke = Callable[..., Any]


@pytest.fixture
def invoke(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Runs `alto` with these arguments in the test's workspace."""
    monkeypatch.setenv("ALTO_HOME", str(settings.home))
    monkeypatch.setenv("ALTO_DEVICE", "cpu")
    monkeypatch.setenv("COLUMNS", "160")
    for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "PREFECT_HOME"):
        monkeypatch.delenv(name, raising=False)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


@pytest.fixture
def task(tmp_path: Path) -> TuningTask:
    return parse_task(
        {
            "name": "made",
            "model": {"name": "some/model"},
            "data": {"source": str(tmp_path / "train.jsonl")},
            "search_space": {"learning_rate": [rate for rate, *_ in ENDS], "lora_rank": 8},
            "budget": {"steps": 40, "gate_warmup_fraction": 0.1},
            "evaluation": {"metric": "exact_match"},
        }
    )


def make_jobs() -> tuple[LoraJob, ...]:
    return tuple(
        LoraJob(learning_rate=rate, lora_rank=8, lora_alpha=16, adapter_batch_size=8, target_modules=("q_proj",))
        for rate, *_ in ENDS
    )


@pytest.fixture
def running_task(settings: Settings, task: TuningTask) -> Iterator[str]:
    """A task in its warmup, held as by its process: one job has diverged, one has not started."""
    store, jobs = Store(settings), make_jobs()
    task_id = store.new_task_id(task.name)
    budgets = {job.job_id: JobBudget(total_steps=40, warmup_steps=4, eval_steps=(2, 4, 40)) for job in jobs}
    store.add_task(task_id, task, jobs, budgets)
    store.start_task(task_id)
    for stage in (Stage.PROFILE, Stage.WARMUP):
        store.set_stage(task_id, stage)
        store.append_events(task_id, [EventDraft(kind="stage", text=stage)])
    finished, overfitting, _, diverging = (job.job_id for job in jobs)
    store.update_jobs(
        task_id,
        [
            JobUpdate(job_id=finished, state=JobState.RUNNING, step=3, train_loss=1.2, val_loss=1.3, best_val_loss=1.3),
            JobUpdate(job_id=overfitting, state=JobState.RUNNING, step=3, train_loss=1.1, val_loss=1.2),
            JobUpdate(job_id=diverging, state=JobState.DIVERGING, step=3, reason=ENDS[3][4], train_loss=math.nan),
        ],
    )
    store.append_events(
        task_id,
        [
            _evaluation(finished, 2, 1.3),
            _evaluation(diverging, 2, math.nan),
            _evaluation(overfitting, 2, 1.2),
            EventDraft(kind="progress", text="", numbers={"tokens_per_second": 187.0}),
            EventDraft(kind="exit", job_id=diverging, text=f"diverging: {ENDS[3][4]}", numbers={"step": 3}),
            EventDraft(kind="news", text="a kind that nobody knows"),
        ],
    )
    with held(task_id, settings.task_folder(task_id)):
        yield task_id


@pytest.fixture
def finished_task(settings: Settings, running_task: str) -> str:
    """The same task at its end: a winner, scores, a registered version."""
    store, jobs = Store(settings), make_jobs()
    updates = [
        JobUpdate(job_id=job.job_id, state=state, step=step, best_val_loss=loss, best_step=step, reason=reason)
        for job, (_, state, step, loss, reason) in zip(jobs, ENDS, strict=True)
        if state is not JobState.DIVERGING
    ]
    store.update_jobs(running_task, updates)
    winner = jobs[0].job_id
    entries = tuple(
        GateEntry(job_id=job.job_id, gate_rank=i + 1, val_loss=1.0 + i, kept=i < 2, reason="top" if i < 2 else "rank")
        for i, job in enumerate(jobs)
    )
    result = TaskResult(
        winner=winner,
        scores=(
            _score(winner, "validation", 0.41, 0.9),
            _score(winner, "test", 0.43, 0.925),
            _score(None, "test", 2.9, 0.0),
        ),
        gates=(GateRecord(fraction=0.1, entries=entries),),
        num_train_rows=320,
        seconds=318.0,
        tracking_share=0.012,
        adapter_folder=str(settings.task_folder(running_task) / "jobs" / winner / "adapter"),
        registered=RegisteredVersion(name="made", version=1, aliases=("champion",)),
    )
    store.set_task_fields(running_task, result=result.to_dict(), winner_job_id=winner)
    store.append_events(running_task, [EventDraft(kind="gate", text="2 go on")])
    store.end_task(running_task, TaskState.FINISHED, "")
    return running_task


def _evaluation(job_id: str, step: int, val_loss: float) -> EventDraft:
    return EventDraft(
        kind="evaluation", text="", job_id=job_id, numbers={"step": step, "val_loss": val_loss, "train_loss": 1.0}
    )


def _score(job_id: str | None, split: str, loss: float, share: float) -> Score:
    interval = Interval(value=share, low=max(0, share - 0.04), high=min(1, share + 0.04), num_rows=240)
    return Score(
        job_id=job_id,
        split=split,
        loss=loss,
        loss_standard_error=0.01,
        metric="exact_match",
        metric_value=interval,
    )
