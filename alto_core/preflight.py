"""The profile stage of one task: measure or recall, plan the packing, forecast the duration, and record all of it."""

from __future__ import annotations

import dataclasses
import time
from functools import partial

import torch

from alto_core import wording
from alto_core.engine.backbone import load_backbone
from alto_core.engine.ranks import rank_group, release_ranks
from alto_core.outcomes import TaskProfile
from alto_core.profiling import (
    Layout,
    PackingQuestion,
    TaskAhead,
    forecast_task,
    make_task_profile,
    measure_grid,
    memory_budget,
    profile_key,
    shape_of_backbone,
    shape_of_model,
)
from alto_core.savings import savings_of
from alto_core.scheduling.memory_model import MemoryModel, ModelShape
from alto_core.scheduling.model_profile import ModelProfile
from alto_core.scheduling.prediction import Forecast
from alto_core.store import EventDraft
from alto_core.workspace import Workspace


def profile_task(workspace: Workspace) -> tuple[TaskProfile, Forecast]:
    """Profile a task on its devices, and choose how they share it.

    Raises:
        EngineError: not even the smallest job fits; the text shows the arithmetic.
    """
    task, store, jobs, devices = workspace.task, workspace.store, list(workspace.jobs.values()), workspace.devices
    started = time.perf_counter()
    device, shape = torch.device(devices[0]), _shape(workspace)
    load_seconds = time.perf_counter() - started
    free_bytes = memory_budget(device, shape.backbone_bytes if len(devices) == 1 else 0)
    question = PackingQuestion.of(
        workspace.data,
        jobs,
        budget_bytes=free_bytes / len(devices) if device.type == "cpu" else free_bytes,  # one memory for all
        device_type=device.type,
        max_slots=task.max_slots,
    )
    model, layout = MemoryModel(shape=shape), Layout()
    if len(devices) > 1:
        asked = None if task.cluster.num_gpus == "auto" else task.cluster.num_gpus
        layout = question.choose_layout(model, asked=asked, available=len(devices))
    by_arithmetic = question.plan(model, layout)
    key = profile_key(task.model, layout.shape(shape), device, cuda_graph=workspace.settings.cuda_graph)
    known = store.model_profile(key)
    is_new = known is None
    if known is None:
        known = _measure(workspace, layout, shape, by_arithmetic.too_large, by_arithmetic.max_pass_tokens)
        known = dataclasses.replace(known, costs=dataclasses.replace(known.costs, load_seconds=load_seconds))
        store.save_model_profile(key, known)
    model = dataclasses.replace(model, fit=known.memory)
    plan = question.plan(model, layout)
    measured = make_task_profile(
        str(device), model, known.speed, plan, num_ranks=layout.num_ranks, sharded=layout.sharded
    )
    gate_fraction = task.budget.gate_warmup_fraction
    ahead = TaskAhead(
        data=workspace.data,
        data_seed=task.data.seed,
        jobs=jobs,
        budgets=workspace.budgets,
        plan=plan,
        shape=shape,
        gates=workspace.gates,
        num_ranks=layout.num_ranks,
    )
    expected = forecast_task(
        ahead,
        known.speed,
        known.costs.once_loaded(is_compiled=is_new),
        savings=savings_of(task.early_exit.preset, store),
        gate_fraction=gate_fraction,
    )
    store.save_profile(workspace.task_id, measured)
    numbers = {
        "seconds_left": expected.seconds,
        "seconds_without_exit": expected.seconds_without_exit,
        "waves": expected.waves,
        "peak_bytes": measured.peak_bytes,
        **{f"{name}_seconds": seconds for name, seconds in dataclasses.asdict(expected.terms).items()},
    }
    event = EventDraft(kind="forecast", text=wording.forecast(expected), numbers=numbers)
    store.append_events(workspace.task_id, [*_notes(workspace, layout), event])
    return measured, expected


def _shape(workspace: Workspace) -> ModelShape:
    """Of the whole model. With one device it is loaded here; with several the ranks will load it."""
    task, devices = workspace.task, workspace.devices
    targets = sorted({name for job in workspace.jobs.values() for name in job.target_modules})
    recomputed = task.activation_checkpointing
    if len(devices) > 1:
        return shape_of_model(task.model, targets, on_gpu=devices[0] != "cpu", recomputed=recomputed)
    return shape_of_backbone(load_backbone(task.model, workspace.device), targets, recomputed=recomputed)


def _measure(
    workspace: Workspace, layout: Layout, whole: ModelShape, too_large: tuple[str, ...], max_pass_tokens: int
) -> ModelProfile:
    """The profile of the model on one rank."""
    task = workspace.task
    fitting = [job.plain for job_id, job in workspace.jobs.items() if job_id not in too_large]
    shape, rows = layout.shape(whole), workspace.data.train.rows
    measure = partial(measure_grid, cuda_graph=workspace.settings.cuda_graph, folder=workspace.folder)
    if layout.num_ranks == 1:
        release_ranks()
        return measure(load_backbone(task.model, workspace.device), shape, fitting, rows)
    ranks = rank_group(task.model, workspace.devices[: layout.num_ranks], sharded=layout.sharded)
    return ranks.on_all(partial(measure, max_tokens=max_pass_tokens), shape, fitting, rows)[0]


def _notes(workspace: Workspace, layout: Layout) -> list[EventDraft]:
    """How several devices share a task, and a warning where there are fewer than it asks for."""
    notes = []
    asked, there = workspace.task.cluster.num_gpus, len(workspace.devices)
    if asked != "auto" and there < asked:
        text = f"cluster.num_gpus asks for {asked} GPUs, and this process sees {there}: the task trains on those"
        notes.append(EventDraft(kind="warning", text=text))
    if layout.num_ranks > 1:
        held = "a part of the decoder layers" if layout.sharded else "the whole model"
        text = f"{layout.num_ranks} ranks, each with {held} and its own jobs"
        notes.append(EventDraft(kind="ranks", text=text))
    return notes
