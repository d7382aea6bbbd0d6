"""How a task, its jobs and its data set are written into MLflow runs, and read back from them.

Tags carry what MLflow users filter by: `alto.task_id`, `alto.job_id`, `alto.state`, `alto.reason`, `alto.gate_rank`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Param, Run
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT, MLFLOW_PARENT_RUN_ID, MLFLOW_USER

from alto_core.budget import job_budget
from alto_core.config import TuningTask
from alto_core.domain import JobState, LoraJob, TaskState
from alto_core.outcomes import JobOutcome, Score
from alto_core.redaction import without_secrets
from alto_core.tracking.names import clean_name

TASK_ID = "alto.task_id"
JOB_ID = "alto.job_id"
JOB_INDEX = "alto.job_index"
WORKSPACE = "alto.workspace"
STATE = "alto.state"
REASON = "alto.reason"
GATE_RANK = "alto.gate_rank"
OWNER = "alto.owner"
"""Of a model version."""

DEFAULT_EMA_ALPHA = 0.1
"""Weight of the newest loss in `train_loss_ema` where the task file's early-exit overrides name none."""

MAX_TAG_LENGTH = 4000
MAX_PARAM_LENGTH = 6000


@dataclass(frozen=True, kw_only=True)
class DatasetSummary:
    """What MLflow shows about the data set of a task."""

    name: str
    source: str
    """File, or hub data set."""
    digest: str
    """Equal digests mean equal rows and splits; at most 36 characters."""
    num_train: int
    num_validation: int
    num_test: int
    num_tokens: int
    """Tokens of the training rows, prompts included."""


@dataclass(frozen=True, kw_only=True)
class TrackedJob:
    """The MLflow run of one job, and what a curve needs to know about the job."""

    job_id: str
    run_id: str
    learning_rate: float
    rows_per_update: int
    total_steps: int
    warmup_steps: int
    state: JobState


def experiment_name(task: TuningTask, data: DatasetSummary, owner: str | None = None) -> str:
    """One experiment per base model, data set and known owner, so that MLflow's charts compare what can be compared."""
    model = task.model.name.rstrip("/")
    name = f"{PurePath(model).name if PurePath(model).is_absolute() else model} on {data.name}"[:500]
    return name if owner is None else f"{name}, {owner}"


def task_tags(task: TuningTask, task_id: str, workspace: str) -> dict[str, str]:
    return {
        TASK_ID: task_id,
        WORKSPACE: workspace,
        STATE: TaskState.RUNNING.value,
        "alto.kind": "task",
        "alto.task_digest": task.digest,
        MLFLOW_USER: task.owner,
    }


def task_params(task: TuningTask, num_jobs: int, data: DatasetSummary) -> list[Param]:
    fields = {
        "model": task.model.name,
        "model_revision": task.model.revision,
        "dtype": task.model.dtype,
        "trust_remote_code": task.model.trust_remote_code,
        "data": data.source,
        "num_jobs": num_jobs,
        "epochs": task.budget.epochs,
        "steps": task.budget.steps,
        "early_exit": task.early_exit.preset,
        "ema_alpha": task.early_exit.overrides.get("alpha", DEFAULT_EMA_ALPHA),
        "choose_by": task.evaluation.choose_by,
        "data_seed": task.data.seed,
    }
    return as_params(fields)


def job_tags(
    task: TuningTask, task_id: str, job: LoraJob, index: int, workspace: str, parent_run_id: str
) -> dict[str, str]:
    return {
        MLFLOW_PARENT_RUN_ID: parent_run_id,
        TASK_ID: task_id,
        JOB_ID: job.job_id,
        JOB_INDEX: str(index),
        WORKSPACE: workspace,
        STATE: JobState.WAITING.value,
        "alto.kind": "job",
        MLFLOW_USER: task.owner,
    }


def job_params(task: TuningTask, job: LoraJob, data: DatasetSummary) -> list[Param]:
    budget = job_budget(job, task.budget, data.num_train)
    lengths = {
        "rows_per_update": job.rows_per_update,
        "total_steps": budget.total_steps,
        "warmup_steps": budget.warmup_steps,
    }
    return as_params({**job.params(), **lengths})


def tracked_job(run: Run) -> TrackedJob:
    """Read a child run back."""
    params, tags = run.data.params, run.data.tags
    return TrackedJob(
        job_id=tags[JOB_ID],
        run_id=run.info.run_id,
        learning_rate=float(params["learning_rate"]),
        rows_per_update=int(params["rows_per_update"]),
        total_steps=int(params["total_steps"]),
        warmup_steps=int(params["warmup_steps"]),
        state=JobState(tags[STATE]),
    )


def job_metrics(outcome: JobOutcome, rows_per_update: int) -> dict[str, float]:
    """How a job ended, as metrics of its run: the best validation loss and its step, rows trained on and rows saved."""
    values: dict[str, float] = {
        "samples": outcome.step * rows_per_update,
        "samples_saved": (outcome.total_steps - outcome.step) * rows_per_update,
    }
    if outcome.best_val_loss is not None and outcome.best_step is not None:
        values |= {"best_val_loss": outcome.best_val_loss, "best_step": outcome.best_step}
    return values


def score_metrics(score: Score) -> dict[str, float]:
    """A held-out score as metrics `<split>_loss`, `<split>_loss_standard_error` and `<split>_<metric>`."""
    values = {"loss": score.loss, "loss_standard_error": score.loss_standard_error}
    if score.metric and score.metric_value:
        values[score.metric] = score.metric_value.value
    return {f"{score.split}_{name}": value for name, value in values.items()}


def as_params(fields: Mapping[str, Any]) -> list[Param]:
    return [
        Param(clean_name(name), shorten(without_secrets(str(value)), MAX_PARAM_LENGTH))
        for name, value in fields.items()
        if value is not None
    ]


def as_tags(fields: Mapping[str, Any]) -> dict[str, str]:
    return {clean_name(name): shorten(without_secrets(str(value)), MAX_TAG_LENGTH) for name, value in fields.items()}


def dataset_input(data: DatasetSummary) -> DatasetInput:
    profile = {
        "num_train": data.num_train,
        "num_validation": data.num_validation,
        "num_test": data.num_test,
        "num_tokens": data.num_tokens,
    }
    source = json.dumps({"source": without_secrets(data.source)})
    dataset = Dataset(data.name, data.digest[:36], "alto", source, profile=json.dumps(profile))
    return DatasetInput(dataset, tags=[InputTag(MLFLOW_DATASET_CONTEXT, "training")])


def shorten(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
