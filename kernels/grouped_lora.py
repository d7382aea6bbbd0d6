"""The one public operation: add the LoRA paths of many adapters to a linear layer's output, with gradients.

Today every device takes the torch twin of `reference`; a faster path is chosen here and nowhere else.
Shape suffixes: see `segments`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.reference import lora_backward_, lora_forward_
from kernels.segments import Segments


def kernel_path(device: torch.device) -> str:
    """Name of the implementation that runs on this device."""
    return f"torch twin on {device.type}"


def grouped_lora(
    base_TO: Tensor,
    x_TI: Tensor,
    a_RI: Tensor,
    b_RO: Tensor,
    segments: Segments,
    layer_index: int,
    *,
    gradient_sinks: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """y = base + scale * (drop(x) A^T) B, each segment with its own adapter. Writes into `base_TO` and returns it.

    Args:
        base_TO: output of the frozen layer for the same tokens; overwritten. Not a leaf that requires gradients.
        x_TI: input of the layer, contiguous, dtype of `base_TO`.
        a_RI: lora_A rows of all adapters, float32; any row stride.
        b_RO: lora_B columns of all adapters, transposed, float32; any row stride.
        segments: which tokens and rank rows belong together; covers exactly T tokens.
        layer_index: the layer's number in the model, the same in forward and backward; enters the dropout mask.
        gradient_sinks: dA and dB are added to these in the backward pass, and autograd gets none. So gradients of all
            layers and adapters can lie in one buffer with A and B's own strides. None: autograd gets dA and dB.

    Returns:
        y_TO. Differentiable once, with respect to base, x, A and B.

    Raises:
        ValueError: the shapes and the segments do not fit.
    """
    _check(base_TO, x_TI, a_RI, b_RO, segments)
    inputs = (base_TO, x_TI, a_RI, b_RO, segments, layer_index, gradient_sinks)
    return _GroupedLora.apply(*inputs)


def _check(base_TO: Tensor, x_TI: Tensor, a_RI: Tensor, b_RO: Tensor, segments: Segments) -> None:
    expected = (x_TI.shape[0], b_RO.shape[1])
    if x_TI.dim() != 2 or base_TO.shape != expected or a_RI.shape != (b_RO.shape[0], x_TI.shape[1]):
        shapes = f"base {tuple(base_TO.shape)}, x {tuple(x_TI.shape)}, A {tuple(a_RI.shape)}, B {tuple(b_RO.shape)}"
        raise ValueError(f"grouped_lora expects base [T, O], x [T, I], A [R, I], B [R, O], but got {shapes}")
    if segments.num_tokens != x_TI.shape[0]:
        raise ValueError(f"grouped_lora expects segments over {x_TI.shape[0]} tokens, but got {segments.num_tokens}")
    last_row = max((s.rank_start + s.lora_rank for s in segments.active), default=0)
    if last_row > a_RI.shape[0]:
        raise ValueError(f"grouped_lora expects rank rows below {a_RI.shape[0]}, but a segment ends at {last_row}")


class _GroupedLora(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        base_TO: Tensor,
        x_TI: Tensor,
        a_RI: Tensor,
        b_RO: Tensor,
        segments: Segments,
        layer_index: int,
        gradient_sinks: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        shrunk = lora_forward_(base_TO, x_TI, a_RI, b_RO, segments, layer_index)
        ctx.mark_dirty(base_TO)
        ctx.save_for_backward(x_TI, a_RI, b_RO, *shrunk)
        ctx.segments, ctx.layer_index, ctx.gradient_sinks = segments, layer_index, gradient_sinks
        return base_TO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, a_RI, b_RO, *shrunk = ctx.saved_tensors
        sinks = ctx.gradient_sinks or tuple(torch.zeros(m.shape, dtype=m.dtype, device=m.device) for m in (a_RI, b_RO))
        inputs = (dy_TO, x_TI, a_RI, b_RO, ctx.segments, ctx.layer_index, shrunk)
        dx_TI = lora_backward_(sinks[0], sinks[1], *inputs, input_needs_gradient=ctx.needs_input_grad[1])
        da_RI, db_RO = (None, None) if ctx.gradient_sinks else sinks
        return dy_TO, dx_TI, da_RI, db_RO, None, None, None
