"""Losses and logit gradients of a chunk of positions, in place, on Triton.

One program per position reads its row of logits twice: a running maximum and sum first, then the probabilities that
overwrite the logits. All arithmetic is float32.

Shape suffixes: see `linear_cross_entropy`.
"""

from __future__ import annotations

# mypy: disallow-untyped-defs=False
# Triton infers the types of what it compiles.
import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

MAX_BLOCK = 8192


@triton.jit
def softmax_losses_kernel(
    logits, label_ids, weights, losses, vocabulary, row_stride, WRITE_GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    position = tl.program_id(0)
    label = tl.load(label_ids + position)
    row = logits + position.to(tl.int64) * row_stride
    label_logit = tl.load(row + label).to(tl.float32)  # before the sums, whose barrier keeps it ahead of the stores
    v = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        x = tl.load(row + start + v, mask=start + v < vocabulary, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, x)
        # A lane that has seen nothing yet holds -inf, and -inf - -inf is not a number.
        settled = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(largest - settled) + tl.exp(x - settled)
        largest = higher
    top = tl.max(largest, 0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    tl.store(losses + position, log_sum - label_logit)
    if WRITE_GRADIENT:
        weight = tl.load(weights + position)
        for start in range(0, vocabulary, BLOCK):
            mask = start + v < vocabulary
            x = tl.load(row + start + v, mask=mask, other=0.0).to(tl.float32)
            g = (tl.exp(x - log_sum) - tl.where(start + v == label, 1.0, 0.0)) * weight
            tl.store(row + start + v, tl.where(weight == 0.0, 0.0, g).to(logits.dtype.element_ty), mask=mask)


def softmax_losses_(logits_cV: Tensor, label_ids_c: Tensor, weights_c: Tensor, write_gradient: bool) -> Tensor:
    """See `linear_cross_entropy.softmax_losses_`. Rows of logits are contiguous."""
    num_positions, vocabulary = logits_cV.shape
    losses_c = torch.empty(num_positions, dtype=torch.float32, device=logits_cV.device)
    block = min(MAX_BLOCK, triton.next_power_of_2(vocabulary))
    softmax_losses_kernel[(num_positions,)](
        logits_cV, label_ids_c, weights_c, losses_c, vocabulary, logits_cV.stride(0),
        WRITE_GRADIENT=write_gradient, BLOCK=block, num_warps=8 if block >= 2048 else 4,
    )  # fmt: skip
    return losses_c
