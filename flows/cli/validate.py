"""`alto validate`: what a task file means, checked against its data and its model. No weights, no training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from alto_core import wording
from alto_core.engine.serving import VLLM_MAX_RANKS, smallest_max_rank
from alto_core.first_look import read_task
from alto_core.loading import loading
from alto_core.settings import load_settings, prepare_environment
from flows.cli.output import busy, console_for, dump, stdout_for

if TYPE_CHECKING:
    from alto_core.preparation import TaskPlan


def run_validate(file: Path, *, as_json: bool) -> None:
    """Print what the task would do; a wrong file, data set or model raises its `AltoError`."""
    prepare_environment(load_settings())
    task = read_task(file)
    with stdout_for(as_json) as stream:
        with busy("reading the rows and the model's structure"):
            with loading():  # here, since it imports torch and transformers; a wrong field is told before that
                from alto_core.preparation import plan_task

            plan = plan_task(task)
        if as_json:
            print(dump(plan_object(plan)), file=stream)
            return
        console = console_for(stream)
        console.print(Text.assemble((f"{file}: ", ""), ("ready to tune", "bold green")), soft_wrap=True)
        for name, value in _facts(plan):
            console.print(Text.assemble((f"  {name:<16}", "dim"), value), soft_wrap=True)
        if plan.interval_note:
            console.print(Text.assemble(("  note            ", "yellow"), plan.interval_note), soft_wrap=True)
        console.print()
        console.print(plan.data.report.as_text(), markup=False, soft_wrap=True)
        console.print()
        console.print(Text.assemble("  ", (f"alto tune {file}", "bold"), "  ", ("starts it", "dim")), soft_wrap=True)


def plan_object(plan: TaskPlan) -> dict:
    """The plan as one JSON object."""
    budgets = [plan.budgets[job.job_id] for job in plan.jobs]
    return {
        "event": "plan",
        "name": plan.task.name,
        "digest": plan.task.digest,
        "num_jobs": len(plan.jobs),
        "job_ids": [job.job_id for job in plan.jobs],
        "steps_min": min(budget.total_steps for budget in budgets),
        "steps_max": max(budget.total_steps for budget in budgets),
        "evaluations_max": max(len(budget.eval_steps) for budget in budgets),
        "evaluation_share": plan.evaluation_share,
        "num_samples": plan.num_samples,
        "num_tokens": plan.num_tokens,
        "target_modules": dict(plan.module_counts),
        "data_digest": plan.data.digest,
        "data": plan.data.report.to_dict(),
    }


def _facts(plan: TaskPlan) -> list[tuple[str, str]]:
    task, content = plan.task, plan_object(plan)
    low, high = content["steps_min"], content["steps_max"]
    modules = ", ".join(f"{name} ({count})" for name, count in plan.module_counts.items())
    return [
        ("jobs", f"{len(plan.jobs)}, {task.search_space.in_words}"),
        ("steps", f"{low} a job" if low == high else f"{low} to {high} a job"),
        (
            "evaluations",
            f"up to {content['evaluations_max']} a job, on {len(plan.data.validation.rows)} validation rows: "
            f"{wording.share(plan.evaluation_share)} of the training's cost",
        ),
        (
            "training",
            f"{wording.count(plan.num_samples)} rows, {wording.count(plan.num_tokens)} tokens if no job ends early",
        ),
        (
            "early exit",
            f"{task.early_exit.preset}, gate at {wording.share(task.budget.gate_warmup_fraction)} of the budget",
        ),
        ("model", f"{task.model.name}, adapters on {modules}"),
        (
            "winner by",
            (task.evaluation.metric or "metric") if task.evaluation.choose_by == "metric" else "validation loss",
        ),
        ("registered as", task.registered_model),
        ("served by", _serving_words(max(job.rank_rows for job in plan.jobs))),
    ]


def _serving_words(largest_rank: int) -> str:
    limit = smallest_max_rank(largest_rank)
    if limit is None:
        return f"vLLM only up to rank {VLLM_MAX_RANKS[-1]}, the search space goes to {largest_rank}"
    return f"vLLM with --max-lora-rank {limit}, whichever job wins"
