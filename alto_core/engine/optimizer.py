"""AdamW, gradient clipping and learning-rate schedules of one job, on its own block of rank rows.

Same arithmetic as torch's `AdamW` and `clip_grad_norm_` and transformers' `get_*_schedule_with_warmup`, in float32. A
job's update reads and writes its own block alone: no other job can be moved by it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from alto_core.domain import JobBudget, LoraJob
from alto_core.engine.slots import SlotBlock

BETA_1, BETA_2 = 0.9, 0.999
EPSILON = 1e-8
CLIP_EPSILON = 1e-6
"""What torch's `clip_grad_norm_` adds to the norm before it divides."""


def learning_rate(job: LoraJob, budget: JobBudget, step: int) -> float:
    """Learning rate of a job's update number `step`, 1-based. With a warmup the first is 0, as in transformers."""
    done, total = step - 1, budget.total_steps
    lr_warmup_steps = math.ceil(job.lr_warmup_fraction * total)
    if done < lr_warmup_steps:
        return job.learning_rate * done / max(1, lr_warmup_steps)
    progress = (done - lr_warmup_steps) / max(1, total - lr_warmup_steps)
    if job.lr_schedule == "linear":
        return job.learning_rate * max(0.0, 1.0 - progress)
    if job.lr_schedule == "cosine":
        return job.learning_rate * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
    return job.learning_rate


def gradient_norm(block: SlotBlock, side_ratios_W: Tensor | None = None) -> float:
    """Euclidean norm of the job's whole gradient. That of columns with ratio 0 is dropped: they are not trained."""
    if side_ratios_W is not None:
        block.grads_rW.masked_fill_(side_ratios_W == 0, 0.0)
    return float(torch.linalg.vector_norm(block.grads_rW))


@torch.no_grad()
def adamw_update(
    block: SlotBlock,
    *,
    step: int,
    rate: float,
    weight_decay: float,
    grad_norm: float,
    max_grad_norm: float,
    scratch_W: Tensor | None = None,
    side_ratios_W: Tensor | None = None,
) -> None:
    """Clip the job's gradient and make one AdamW update, in place.

    Args:
        block: the job's rank rows; its gradient is scaled when clipped.
        step: number of this update, 1-based; for the bias correction.
        rate: learning rate of this update.
        weight_decay: decoupled, as in torch.
        grad_norm: what `gradient_norm` gave; finite.
        max_grad_norm: norm to clip to; 0 turns clipping off.
        scratch_W: one row to compute in, so that nothing is allocated, and memory cannot run out, between two writes.
        side_ratios_W: learning rate of each column over `rate`; None: all are 1.
    """
    scratch_W = torch.empty_like(block.params_rW[0]) if scratch_W is None else scratch_W
    shrink = min(1.0, max_grad_norm / (grad_norm + CLIP_EPSILON)) if max_grad_norm else 1.0
    step_size = rate / (1.0 - BETA_1**step)
    correction_2_sqrt = math.sqrt(1.0 - BETA_2**step)
    # Row by row the four arrays stay in the cache, which makes the update about twice as fast as over whole blocks.
    for param, grad, exp_avg, exp_avg_sq in zip(
        block.params_rW, block.grads_rW, block.exp_avg_rW, block.exp_avg_sq_rW, strict=True
    ):
        if side_ratios_W is None:
            decay: float | Tensor = 1.0 - rate * weight_decay
        else:
            decay = torch.mul(side_ratios_W, -rate * weight_decay, out=scratch_W).add_(1.0)
        _update_row(
            param, grad, exp_avg, exp_avg_sq, scratch_W, shrink, decay, step_size, correction_2_sqrt, side_ratios_W
        )


def _update_row(
    param_W: Tensor,
    grad_W: Tensor,
    exp_avg_W: Tensor,
    exp_avg_sq_W: Tensor,
    scratch_W: Tensor,
    shrink: float,
    decay: float | Tensor,
    step_size: float,
    correction_2_sqrt: float,
    side_ratios_W: Tensor | None,
) -> None:
    if shrink != 1.0:
        grad_W.mul_(shrink)
    if isinstance(decay, Tensor) or decay != 1.0:
        param_W.mul_(decay)
    exp_avg_W.lerp_(grad_W, 1.0 - BETA_1)
    exp_avg_sq_W.mul_(BETA_2).addcmul_(grad_W, grad_W, value=1.0 - BETA_2)
    denominator_W = torch.sqrt(exp_avg_sq_W, out=scratch_W).div_(correction_2_sqrt).add_(EPSILON)
    if side_ratios_W is not None:
        denominator_W.div_(side_ratios_W)  # infinite where the ratio is 0, so that nothing moves
    param_W.addcdiv_(exp_avg_W, denominator_W, value=-step_size)
