"""What one task gets on one device: slots, rank rows and tokens of a pass, from the model's profile and free memory."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch

import alto_core.engine
import alto_core.profiling
import kernels
from alto_core.config import ModelSection
from alto_core.data.rows import TaskData
from alto_core.device import free_bytes
from alto_core.domain import LoraJob
from alto_core.engine.engine import PASS_TOKENS
from alto_core.errors import EngineError
from alto_core.outcomes import TaskProfile
from alto_core.scheduling.intra_task import JobSize, PackingPlan, plan_packing
from alto_core.scheduling.memory_model import MemoryModel, ModelShape
from alto_core.scheduling.prediction import PassSpeed
from alto_core.scheduling.remedies import arithmetic, remedies

SAFETY_SHARE = {"cpu": 0.85, "cuda": 0.92}
"""Of the free memory that a task may plan with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskRows:
    """What the arithmetic needs to know of a task's rows."""

    mean: float
    """Tokens of a training row."""
    longest: int
    label_share: float
    """Of the tokens that are trained on."""

    @classmethod
    def of(cls, data: TaskData) -> TaskRows:
        """The training rows of a task."""
        tokens = sum(len(row.token_ids) for row in data.train.rows)
        return cls(
            mean=tokens / len(data.train.rows),
            longest=max(len(row.token_ids) for row in data.train.rows),
            label_share=sum(row.num_labels for row in data.train.rows) / tokens,
        )


def profile_key(section: ModelSection, shape: ModelShape, device: torch.device, *, cuda_graph: bool) -> str:
    """Under which a model's profile is kept: equal where the same measurements would come out again."""
    is_gpu = device.type == "cuda"
    kind = torch.cuda.get_device_name(device) if is_gpu else f"cpu, {torch.get_num_threads()} threads"
    parts = [
        section.name,
        section.revision,
        dataclasses.asdict(shape),
        kind,
        cuda_graph,
        torch.__version__,
        _code_digest(),
    ]
    return f"model-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}"


def job_size(job: LoraJob, rows: TaskRows) -> JobSize:
    """By the mean row."""
    return JobSize(
        job_id=job.job_id,
        adapter_batch_size=job.adapter_batch_size,
        lora_rank=job.rank_rows,
        row_tokens=rows.mean,
    )


def plan_task_packing(
    model: MemoryModel,
    jobs: Sequence[LoraJob],
    rows: TaskRows,
    *,
    budget_bytes: float,
    device_type: str,
    max_slots: int | None,
) -> PackingPlan:
    """Slots and passes within the memory.

    Raises:
        EngineError: not even the smallest job fits; the text shows the arithmetic and what would make it fit.
    """
    sizes = [job_size(job, rows) for job in jobs]
    together = sum(size.step_tokens for size in sizes)
    # More tokens than all jobs have are of no use to a pass.
    pass_tokens = min(PASS_TOKENS[device_type], 1 << math.ceil(math.log2(max(2.0, together))))
    plan = plan_packing(
        model,
        sizes,
        budget_bytes=budget_bytes,
        pass_tokens=pass_tokens,
        longest_row=rows.longest,
        label_share=rows.label_share,
        max_slots=max_slots,
    )
    if plan is None:
        smallest = min(sizes, key=lambda size: (size.adapter_batch_size, size.lora_rank))
        changes = remedies(
            model, smallest, budget_bytes=budget_bytes, longest_row=rows.longest, label_share=rows.label_share
        )
        sum_of_parts = arithmetic(
            model, smallest, budget_bytes=budget_bytes, longest_row=rows.longest, label_share=rows.label_share
        )
        advice = (
            f"One of these makes it fit: {'; '.join(changes)}." if changes else "Use a larger GPU or smaller model."
        )
        raise EngineError(f"not enough memory for the smallest job: {sum_of_parts}. {advice}")
    return plan


def memory_budget(device: torch.device, held_bytes: int) -> float:
    """Bytes that backbone, slots and passes may take together.

    Args:
        held_bytes: of the backbone, if it is loaded; else 0.
    """
    return held_bytes + SAFETY_SHARE[device.type] * free_bytes(device)


def make_task_profile(
    device: str,
    model: MemoryModel,
    speed: PassSpeed,
    plan: PackingPlan,
    *,
    num_ranks: int = 1,
    sharded: bool = False,
) -> TaskProfile:
    """The plan as the stages use it.

    Args:
        device: of the first rank.
        model: of the memory.
        speed: of one rank's passes.
        plan: capacity of all ranks.
        num_ranks, sharded: as in `TaskProfile`.
    """
    capacity = plan.capacity
    seconds = speed.on_ranks(num_ranks).step_seconds(capacity.step_tokens, plan.max_pass_tokens * num_ranks)
    return TaskProfile(
        device=device,
        num_slots=capacity.num_slots,
        seconds_per_step=seconds,
        tokens_per_second=capacity.step_tokens / max(seconds, 1e-9),
        peak_bytes=plan.peak_bytes,
        bytes_per_job=model.slot_bytes(capacity.rank_rows) // capacity.num_slots,
        max_pass_tokens=plan.max_pass_tokens,
        rank_rows=capacity.rank_rows,
        step_tokens=capacity.step_tokens,
        num_ranks=num_ranks,
        sharded=sharded,
    )


def _code_digest() -> str:
    """Of everything that a step runs, and of how it is measured."""
    digest = hashlib.sha256()
    for package in (alto_core.engine, alto_core.profiling, kernels):
        for file in sorted(Path(package.__path__[0]).glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
