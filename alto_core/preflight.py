"""The profile stage of one task: measure or recall, plan the packing, forecast the duration, and record all of it."""

from __future__ import annotations

import dataclasses

from alto_core import wording
from alto_core.engine.backbone import load_backbone
from alto_core.outcomes import TaskProfile
from alto_core.profiling import (
    TaskRows,
    forecast_task,
    make_task_profile,
    measure_grid,
    memory_budget,
    plan_task_packing,
    profile_key,
    shape_of_backbone,
)
from alto_core.scheduling.intra_task import PackingPlan
from alto_core.scheduling.memory_model import MemoryModel
from alto_core.scheduling.prediction import Forecast, expected_savings
from alto_core.store import EventDraft
from alto_core.workspace import Workspace


def profile_task(workspace: Workspace) -> tuple[TaskProfile, Forecast]:
    """Profile a task on its device.

    Raises:
        EngineError: not even the smallest job fits; the text shows the arithmetic.
    """
    task, store, jobs = workspace.task, workspace.store, list(workspace.jobs.values())
    backbone = load_backbone(task.model, workspace.device)
    device, rows = backbone.device, TaskRows.of(workspace.data)
    shape = shape_of_backbone(
        backbone,
        sorted({name for job in jobs for name in job.target_modules}),
        recomputed=task.activation_checkpointing,
    )
    model = MemoryModel(shape=shape)
    budget = memory_budget(device, shape.backbone_bytes)

    def plan_with(memory: MemoryModel) -> PackingPlan:
        return plan_task_packing(
            memory, jobs, rows, budget_bytes=budget, device_type=device.type, max_slots=task.max_slots
        )

    by_arithmetic = plan_with(model)
    key = profile_key(task.model, shape, device, cuda_graph=workspace.settings.cuda_graph)
    known = store.model_profile(key)
    if known is None:
        fitting = [job.plain for job in jobs if job.job_id not in by_arithmetic.too_large]
        known = measure_grid(
            backbone, shape, fitting, workspace.data.train.rows, cuda_graph=workspace.settings.cuda_graph
        )
        store.save_model_profile(key, known)
    model = dataclasses.replace(model, fit=known.memory)
    plan = plan_with(model)
    measured = make_task_profile(backbone, model, known.speed, plan)
    expected = forecast_task(
        jobs,
        workspace.budgets,
        rows,
        plan,
        known.speed,
        savings=expected_savings(task.early_exit.preset, store.past_savings(task.early_exit.preset)),
        gate_fraction=task.budget.gate_warmup_fraction,
    )
    store.save_profile(workspace.task_id, measured)
    numbers = {
        "seconds_left": expected.seconds,
        "seconds_without_exit": expected.seconds_without_exit,
        "waves": expected.waves,
        "peak_bytes": measured.peak_bytes,
    }
    event = EventDraft(kind="forecast", text=wording.forecast(expected), numbers=numbers)
    store.append_events(workspace.task_id, [event])
    return measured, expected
