"""One AdamW update of every job in the flat buffers of rank rows, and each job's gradient norm, in Triton.

Every number that changes lies in device tensors, so that a captured step can be replayed. A rank row belongs to one
job or to none; rows of none, and of jobs that are not updated, stay untouched bit for bit. Arithmetic as in torch's
AdamW and `clip_grad_norm_`, in float32. The norm's partial sums are added in a fixed order.

Shape suffixes: R rank rows, W columns, J jobs, N column blocks.
"""

from __future__ import annotations

# mypy: disallow-untyped-defs=False
# Triton infers the types of what it compiles.
from dataclasses import dataclass

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

BLOCK = 4096
NORM_BLOCK = 8192


@dataclass(frozen=True, kw_only=True, eq=False)
class AdamWState:
    """Per-job numbers of one update, on the device; all float32 [J] unless said otherwise."""

    job_of_row_R: Tensor
    """int32; -1 for a rank row of nobody."""
    is_updated_J: Tensor
    """int32, 0 or 1."""
    learning_rate_J: Tensor
    weight_decay_J: Tensor
    beta1_J: Tensor
    beta2_J: Tensor
    epsilon_J: Tensor
    correction1_J: Tensor
    """1 - beta1 ** step."""
    correction2_sqrt_J: Tensor
    """sqrt(1 - beta2 ** step)."""
    max_grad_norm_J: Tensor
    """0 turns clipping off."""
    a_ratio_J: Tensor
    """Learning rate of A's columns over the job's own; 0 leaves them out of the norm as well."""
    b_ratio_J: Tensor
    """The same of B's."""
    is_b_W: Tensor
    """int8, 1 in the columns of B. This and the ratios are read where an update is `by_side`."""


@triton.jit
def square_sums_kernel(
    grads, job_of_row, sums, a_ratio, b_ratio, is_b, width, num_blocks,
    HAS_SIDES: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // num_blocks
    block = tl.program_id(0) % num_blocks
    job = tl.load(job_of_row + row)
    if job < 0:
        return
    column = block * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    g = tl.load(grads + row.to(tl.int64) * width + column, mask=column < width, other=0.0)
    if HAS_SIDES:
        of_b = tl.load(is_b + column, mask=column < width, other=0) != 0
        # Not multiplied by 0: a gradient that is not finite must not come along.
        g = tl.where(tl.where(of_b, tl.load(b_ratio + job), tl.load(a_ratio + job)) != 0, g, 0.0)
    tl.store(sums + tl.program_id(0), tl.sum(g * g, 0))


@triton.jit
def norms_kernel(sums, job_of_row, norms, num_rows, num_blocks, BLOCK_ROWS: tl.constexpr, BLOCK_SUMS: tl.constexpr):
    job = tl.program_id(0)
    r = tl.arange(0, BLOCK_ROWS)
    n = tl.arange(0, BLOCK_SUMS)
    total = tl.zeros([BLOCK_ROWS, BLOCK_SUMS], tl.float64)
    for row_start in range(0, num_rows, BLOCK_ROWS):
        row = row_start + r
        mine = tl.load(job_of_row + row, mask=row < num_rows, other=-1) == job
        if tl.sum(mine.to(tl.int32), 0) > 0:
            for start in range(0, num_blocks, BLOCK_SUMS):
                mask = mine[:, None] & (start + n < num_blocks)[None, :]
                part = tl.load(sums + row[:, None] * num_blocks + start + n[None, :], mask=mask, other=0.0)
                total += part.to(tl.float64)
    tl.store(norms + job, tl.sqrt(tl.sum(tl.sum(total, 1), 0)).to(tl.float32))


@triton.jit
def adamw_kernel(
    weights, grads, exp_avg, exp_avg_sq, shadow,
    job_of_row, is_updated, learning_rate, weight_decay, beta1, beta2, epsilon, correction1, correction2_sqrt,
    max_grad_norm, a_ratio, b_ratio, is_b, norms, losses, width, num_blocks,
    HAS_SHADOW: tl.constexpr, HAS_SIDES: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // num_blocks
    job = tl.load(job_of_row + row)
    if job < 0:
        return
    norm = tl.load(norms + job)
    # Comparisons are false for NaN as well.
    is_finite = (norm < float("inf")) & (tl.abs(tl.load(losses + job)) < float("inf"))
    if (tl.load(is_updated + job) == 0) | (is_finite == 0):
        return
    column = (tl.program_id(0) % num_blocks) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    mask = column < width
    place = row.to(tl.int64) * width + column
    g = tl.load(grads + place, mask=mask, other=0.0)
    p = tl.load(weights + place, mask=mask, other=0.0)
    m = tl.load(exp_avg + place, mask=mask, other=0.0)
    v = tl.load(exp_avg_sq + place, mask=mask, other=0.0)
    limit, rate = tl.load(max_grad_norm + job), tl.load(learning_rate + job)
    if HAS_SIDES:
        of_b = tl.load(is_b + column, mask=mask, other=0) != 0
        ratio = tl.where(of_b, tl.load(b_ratio + job), tl.load(a_ratio + job))
        g = tl.where(ratio != 0, g, 0.0)
        rate *= ratio
    b1, b2 = tl.load(beta1 + job), tl.load(beta2 + job)
    shrink = tl.where(limit > 0, tl.minimum(1.0, limit / (norm + 1e-6)), 1.0)
    g *= shrink
    p *= 1.0 - rate * tl.load(weight_decay + job)
    m += (g - m) * (1.0 - b1)
    v = v * b2 + g * g * (1.0 - b2)
    denominator = tl.sqrt(v) / tl.load(correction2_sqrt + job) + tl.load(epsilon + job)
    p -= rate / tl.load(correction1 + job) * m / denominator
    tl.store(weights + place, p, mask=mask)
    tl.store(exp_avg + place, m, mask=mask)
    tl.store(exp_avg_sq + place, v, mask=mask)
    if HAS_SHADOW:
        tl.store(shadow + place, p.to(shadow.dtype.element_ty), mask=mask)


def gradient_norms(grads_RW: Tensor, state: AdamWState, *, by_side: bool = False) -> Tensor:
    """Euclidean norm of each job's whole gradient, float32 [J]; 0 for a job without rank rows."""
    job_of_row_R, num_jobs = state.job_of_row_R, len(state.learning_rate_J)
    num_rows, width = grads_RW.shape
    num_blocks = triton.cdiv(width, NORM_BLOCK)
    sums_RN = grads_RW.new_empty(num_rows, num_blocks)
    norms_J = grads_RW.new_empty(num_jobs)
    square_sums_kernel[(num_rows * num_blocks,)](
        grads_RW, job_of_row_R, sums_RN, state.a_ratio_J, state.b_ratio_J, state.is_b_W, width, num_blocks,
        HAS_SIDES=by_side, BLOCK_WIDTH=NORM_BLOCK, num_warps=8,
    )  # fmt: skip
    norms_kernel[(num_jobs,)](
        sums_RN, job_of_row_R, norms_J, num_rows, num_blocks, BLOCK_ROWS=16, BLOCK_SUMS=128, num_warps=4
    )
    return norms_J


def adamw_update_(
    params_RW: Tensor,
    grads_RW: Tensor,
    exp_avg_RW: Tensor,
    exp_avg_sq_RW: Tensor,
    state: AdamWState,
    *,
    losses_J: Tensor | None = None,
    shadow_RW: Tensor | None = None,
    by_side: bool = False,
) -> Tensor:
    """Clip and update every job that is to be updated and whose gradient and loss are finite.

    Args:
        params_RW, grads_RW, exp_avg_RW, exp_avg_sq_RW: contiguous float32. Gradients are read only.
        state: of this update.
        losses_J: float32; a job whose loss is not finite is not updated. None: gradients alone decide.
        shadow_RW: copy of the parameters in the compute dtype, kept up to date; None: there is none.
        by_side: A and B of some job have learning rates of their own. Without, the ratios are not read.

    Returns:
        norms_J, float32, before clipping.
    """
    num_rows, width = params_RW.shape
    norms_J = gradient_norms(grads_RW, state, by_side=by_side)
    num_blocks = triton.cdiv(width, BLOCK)
    adamw_kernel[(num_rows * num_blocks,)](
        params_RW, grads_RW, exp_avg_RW, exp_avg_sq_RW, params_RW if shadow_RW is None else shadow_RW,
        state.job_of_row_R, state.is_updated_J, state.learning_rate_J, state.weight_decay_J, state.beta1_J,
        state.beta2_J, state.epsilon_J, state.correction1_J, state.correction2_sqrt_J, state.max_grad_norm_J,
        state.a_ratio_J, state.b_ratio_J, state.is_b_W,
        norms_J, norms_J if losses_J is None else losses_J, width, num_blocks,
        HAS_SHADOW=shadow_RW is not None, HAS_SIDES=by_side, BLOCK_WIDTH=BLOCK, num_warps=8,
    )  # fmt: skip
    return norms_J
