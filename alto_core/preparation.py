"""From a task file to a task that can run: data tokenized, layers checked, jobs and budgets laid out, all recorded.

`plan_task` computes and writes nothing; `alto validate` stops there. `create_task` records the plan under a task id.
No weights are loaded and no GPU is touched in this module.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from alto_core import wording
from alto_core.budget import evaluation_share, job_budget, num_samples
from alto_core.config import TuningTask
from alto_core.containment import inside
from alto_core.data.prepare import prepare_data
from alto_core.data.rows import TaskData
from alto_core.data.storage import load_task_data, save_task_data
from alto_core.domain import JobBudget, LoraJob
from alto_core.early_exit.policy import make_policy
from alto_core.engine.quantized_linear import check_quantization
from alto_core.engine.target_modules import check_target_modules, linear_endings
from alto_core.errors import TaskFileError
from alto_core.evaluation import check_metric
from alto_core.first_look import check_named
from alto_core.inputs import record_inputs
from alto_core.result import TaskResult
from alto_core.search_space import expand_search_space
from alto_core.settings import Settings
from alto_core.store import EventDraft, Store
from alto_core.tracking import DatasetSummary, Tracker
from alto_core.workspace import tracking_event


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """All that is known of a task before it trains."""

    task: TuningTask
    """The task file's, its evaluation interval made longer where evaluations would cost too much."""
    as_given: TuningTask
    """The task file's."""
    data: TaskData
    jobs: tuple[LoraJob, ...]
    budgets: Mapping[str, JobBudget]
    module_counts: Mapping[str, int]
    """Layers matched by each target module name."""
    evaluation_share: float
    """Cost of all evaluations, as a share of the training's, if no job ends early."""
    wanted_evaluation_share: float
    """The same with the interval of the task file; above `budget.max_eval_share` the plan's interval is longer."""

    @property
    def num_samples(self) -> int:
        """Rows that all jobs together would train on if none ended early, repetitions counted."""
        rows = len(self.data.train.rows)
        return sum(num_samples(job, self.budgets[job.job_id].total_steps, rows) for job in self.jobs)

    @property
    def interval_note(self) -> str:
        """What was done about the cost of evaluations; empty where nothing had to be."""
        budget = self.task.budget
        if self.wanted_evaluation_share <= budget.max_eval_share:
            return ""
        if self.evaluation_share == self.wanted_evaluation_share:
            return (
                f"evaluations cost {wording.share(self.evaluation_share)} of the training, above "
                "budget.max_eval_share, and jobs this short cannot have fewer: train longer, or choose with fewer "
                "validation rows"
            )
        return (
            f"evaluations as often as asked would cost {wording.share(self.wanted_evaluation_share)} of the training; "
            f"with one every {100 * budget.eval_interval_fraction:.3g} % of a job's steps they cost "
            f"{wording.share(self.evaluation_share)} (budget.max_eval_share)"
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of those rows, by the mean row length."""
        rows = self.data.train.rows
        return round(self.num_samples * sum(len(row.token_ids) for row in rows) / len(rows))


def plan_task(task: TuningTask) -> TaskPlan:
    """Check a task against its data and its model, and lay out its jobs.

    Raises:
        TaskFileError: a field does not fit the data or the model.
        DataError: the data set cannot be used.
        ModelError: the base model is missing, or has no such layer.
    """
    make_policy(task.early_exit.preset, task.early_exit.overrides)
    check_named(task)
    endings = linear_endings(task.model)
    jobs = expand_search_space(task.search_space, endings, task.betas)
    _check_num_gpus(task, jobs)
    module_counts: dict[str, int] = {}
    for modules in sorted({job.target_modules for job in jobs}):
        ranks = sorted({job.lora_rank for job in jobs if job.target_modules == modules})
        module_counts |= check_target_modules(task.model, modules, lora_ranks=ranks)
    check_quantization(task.model)
    data = prepare_data(task.data, task.model)
    held_out = [data.validation] if data.test is None else [data.validation, data.test]
    check_metric(task.evaluation, {split.name: split.generation_rows for split in held_out})
    if task.init_adapter is not None:
        _check_init_adapter(Path(task.init_adapter), jobs)
    share, as_given = _evaluation_share(task, jobs, data), task
    if share > task.budget.max_eval_share:
        interval = min(1.0, task.budget.eval_interval_fraction * share / task.budget.max_eval_share)
        task = task.model_copy(update={"budget": task.budget.model_copy(update={"eval_interval_fraction": interval})})
    return TaskPlan(
        task=task,
        as_given=as_given,
        data=data,
        jobs=jobs,
        budgets=_budgets(task, jobs, data),
        module_counts=module_counts,
        evaluation_share=_evaluation_share(task, jobs, data),
        wanted_evaluation_share=share,
    )


def _check_num_gpus(task: TuningTask, jobs: Sequence[LoraJob]) -> None:
    """Raises TaskFileError where a task on several GPUs has a packed model, or jobs that one process must measure."""
    if task.cluster.num_gpus == 1:
        return
    if task.model.quantization != "none":
        raise TaskFileError(
            "cluster.num_gpus",
            got=str(task.cluster.num_gpus),
            expected=f"1 with model.quantization: {task.model.quantization}, since packed weights are not divided",
        )
    measured = next((job for job in jobs if job.needs_measures), None)
    if measured is not None:
        raise TaskFileError(
            "cluster.num_gpus",
            got=str(task.cluster.num_gpus),
            expected=f"1 with jobs such as {measured.job_id}: shares of the layers, ranks by layer and starts from the "
            "task's inputs are measured on one GPU",
        )


def create_task(plan: TaskPlan, task_id: str, settings: Settings, *, task_file: Path | None = None) -> None:
    """Record a plan under its id: rows on disk, jobs in the store, one MLflow run for the task and one per job.

    Args:
        plan: what to record.
        task_id: a new id.
        settings: where to.
        task_file: that the task was read from; a resume looks whether it still says the same.

    Raises:
        TaskFileError: the task's owner is someone else than who is logged in to MLflow.
    """
    tracker = Tracker(settings)
    task = tracker.person.as_owner(plan.task)
    folder = settings.task_folder(task_id)
    folder.mkdir(parents=True, exist_ok=True)
    record_inputs(plan.as_given, folder, task_file)
    save_task_data(plan.data, inside(folder, "data"))
    store = Store(settings)
    store.add_task(task_id, task, plan.jobs, plan.budgets)
    if plan.interval_note:
        store.append_events(task_id, [EventDraft(kind="warning", text=plan.interval_note)])
    _open_runs(store, tracker, task_id, plan.data)


def finish_creation(task_id: str, settings: Settings) -> None:
    """Open the MLflow runs of a recorded task whose creator died before it had."""
    store = Store(settings)
    if store.task(task_id).parent_run_id is None:
        _open_runs(store, Tracker(settings), task_id, load_task_data(inside(settings.task_folder(task_id), "data")))
    store.close()


def _open_runs(store: Store, tracker: Tracker, task_id: str, data: TaskData) -> None:
    task, jobs = store.task(task_id).task, [record.job for record in store.jobs(task_id)]
    result = TaskResult(num_train_rows=len(data.train.rows), data_report=data.report.to_dict())
    runs = tracker.open_task(task, task_id, jobs, _summarize(task, data))
    runs.release()
    store.set_task_fields(task_id, parent_run_id=runs.parent_run_id, result=result.to_dict())
    store.append_events(task_id, [tracking_event(runs)])


def _budgets(task: TuningTask, jobs: Sequence[LoraJob], data: TaskData) -> dict[str, JobBudget]:
    return {job.job_id: job_budget(job, task.budget, len(data.train.rows)) for job in jobs}


def _evaluation_share(task: TuningTask, jobs: Sequence[LoraJob], data: TaskData) -> float:
    return evaluation_share(
        jobs,
        _budgets(task, jobs, data),
        num_train_rows=len(data.train.rows),
        train_tokens=sum(len(row.token_ids) for row in data.train.rows),
        validation_tokens=sum(len(row.token_ids) for row in data.validation.rows),
    )


def _check_init_adapter(folder: Path, jobs: Sequence[LoraJob]) -> None:
    """A PEFT folder of the rank that all jobs have; tensors are checked when a job is admitted."""
    try:
        lora_rank = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["r"]
    except (OSError, ValueError, KeyError, TypeError):
        raise TaskFileError(
            "init_adapter", got=str(folder), expected="a PEFT folder with adapter_config.json"
        ) from None
    expected = {"init": "default", "layer_share": 1.0, "rank_allocation": "uniform"}
    for (field, value), job in itertools.product(expected.items(), jobs):
        if getattr(job, field) != value:
            raise TaskFileError(
                f"search_space.{'layers' if field == 'layer_share' else field}",
                got=f"{getattr(job, field)} beside an `init_adapter`",
                expected="the default: every job starts from that adapter, with its layers and ranks",
                hint="Leave one of the two out.",
            )
    others = sorted({job.lora_rank for job in jobs} - {lora_rank})
    if others:
        raise TaskFileError(
            "init_adapter",
            got=f"an adapter of rank {lora_rank}",
            expected=f"one of rank {others[0]}, as the search space has",
            hint=f"Set search_space.lora_rank to {lora_rank}.",
        )


def _summarize(task: TuningTask, data: TaskData) -> DatasetSummary:
    return DatasetSummary(
        name=wording.short_name(task.data.source),
        source=task.data.source,
        digest=data.digest,
        num_train=len(data.train.rows),
        num_validation=len(data.validation.rows),
        num_test=len(data.test.rows) if data.test else 0,
        num_tokens=sum(len(row.token_ids) for row in data.train.rows),
    )
