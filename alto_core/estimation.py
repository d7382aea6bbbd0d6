"""What a task will take before it is launched: memory, jobs side by side, time. For this machine or for another GPU."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from alto_core.device import pick_device, pick_devices
from alto_core.early_exit.policy import gate_fractions, make_policy
from alto_core.preparation import TaskPlan
from alto_core.profiling import (
    Layout,
    PackingQuestion,
    TaskAhead,
    forecast_task,
    memory_budget,
    profile_key,
    shape_of_model,
)
from alto_core.profiling.gpu_kinds import CONTEXT_BYTES, GpuKind
from alto_core.profiling.task_profile import SAFETY_SHARE
from alto_core.savings import savings_of
from alto_core.scheduling.memory_model import MemoryModel
from alto_core.scheduling.prediction import Forecast, PassSpeed, SideCosts
from alto_core.settings import Settings
from alto_core.store import Store

MAX_GPUS = 8
"""That `num_gpus: auto` may come to where the machine is not known."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a task takes on one device."""

    device: str
    basis: str
    """`measured`: a profile of this model on this device is known; `arithmetic`: nothing was measured."""
    layout: Layout
    """How many such devices share the task, and how; memory is that of one."""
    num_slots: int
    """On all of them."""
    backbone_bytes: int
    adapter_bytes: int
    pass_bytes: int
    budget_bytes: int
    """That the three may take together."""
    max_pass_tokens: int
    too_large: tuple[str, ...]
    """Ids of jobs that do not fit."""
    forecast: Forecast | None
    """None where the speed of the device is not known."""

    @property
    def peak_bytes(self) -> int:
        return self.backbone_bytes + self.adapter_bytes + self.pass_bytes


def estimate_task(plan: TaskPlan, settings: Settings, gpu: GpuKind | None) -> Estimate:
    """Estimate a task.

    Args:
        plan: of the task.
        settings: whose store knows measured profiles and past tasks.
        gpu: that is not here; None: this machine's device.

    Raises:
        EngineError: not even the smallest job fits; the text shows the arithmetic and what would make it fit.
        TaskFileError: `ALTO_DEVICE` names a device that is not here.
    """
    task, store = plan.task, Store(settings)
    name = gpu.name if gpu else pick_device(settings.device)
    on_gpu = name != "cpu"
    shape = shape_of_model(
        task.model,
        sorted({target for job in plan.jobs for target in job.target_modules}),
        on_gpu=on_gpu,
        recomputed=task.activation_checkpointing,
    )
    model, speed, costs, basis = MemoryModel(shape=shape), None, SideCosts(), "arithmetic"
    asked = None if task.cluster.num_gpus == "auto" else task.cluster.num_gpus
    if gpu:
        available, budget, speed = asked or MAX_GPUS, SAFETY_SHARE["cuda"] * gpu.free_bytes, gpu.speed(shape)
    else:
        available = len(pick_devices(settings.device, asked))
        budget = memory_budget(torch.device(name), 0) / (1 if on_gpu else available)
    question = _question(plan, budget_bytes=budget, on_gpu=on_gpu)
    layout = question.choose_layout(model, asked=asked, available=available)
    if not gpu:
        held = layout.shape(shape)
        known = store.model_profile(profile_key(task.model, held, torch.device(name), cuda_graph=settings.cuda_graph))
        if known:
            model, basis = dataclasses.replace(model, fit=known.memory), "measured"
            speed, costs = known.speed, known.costs
    packing = question.plan(model, layout)
    preset, gate_fraction = task.early_exit.preset, task.budget.gate_warmup_fraction
    policy = make_policy(preset, task.early_exit.overrides)
    gates = gate_fractions(policy, gate_fraction, plan.budgets.values())

    def forecast_at(known_speed: PassSpeed) -> Forecast:
        ahead = TaskAhead(
            data=plan.data,
            data_seed=task.data.seed,
            jobs=plan.jobs,
            budgets=plan.budgets,
            plan=packing,
            shape=shape,
            gates=gates,
            num_ranks=layout.num_ranks,
        )
        savings = savings_of(preset, store)
        return forecast_task(ahead, known_speed, costs, savings=savings, gate_fraction=gate_fraction)

    adapter_bytes = model.slot_bytes(packing.capacity.rank_rows // layout.num_ranks)
    backbone_bytes = layout.shape(shape).backbone_bytes
    return Estimate(
        device=name,
        basis=basis,
        layout=layout,
        num_slots=packing.capacity.num_slots,
        backbone_bytes=backbone_bytes,
        adapter_bytes=adapter_bytes,
        pass_bytes=packing.peak_bytes - backbone_bytes - adapter_bytes,
        budget_bytes=int(budget),
        max_pass_tokens=packing.max_pass_tokens,
        too_large=packing.too_large,
        forecast=forecast_at(speed) if speed else None,
    )


def gpus_needed(plan: TaskPlan, *, gpu_bytes: int, most: int) -> int:
    """GPUs of so much memory that a task takes: what its file says, or as few as hold it.

    Args:
        plan: of the task.
        gpu_bytes: memory of each GPU.
        most: GPUs that one host has.
    """
    task = plan.task
    if task.cluster.num_gpus != "auto":
        return task.cluster.num_gpus
    targets = sorted({target for job in plan.jobs for target in job.target_modules})
    shape = shape_of_model(task.model, targets, on_gpu=True, recomputed=task.activation_checkpointing)
    question = _question(plan, budget_bytes=SAFETY_SHARE["cuda"] * max(0, gpu_bytes - CONTEXT_BYTES), on_gpu=True)
    return question.choose_layout(MemoryModel(shape=shape), asked=None, available=most).num_ranks


def _question(plan: TaskPlan, *, budget_bytes: float, on_gpu: bool) -> PackingQuestion:
    return PackingQuestion.of(
        plan.data,
        plan.jobs,
        budget_bytes=budget_bytes,
        device_type="cuda" if on_gpu else "cpu",
        max_slots=plan.task.max_slots,
    )
