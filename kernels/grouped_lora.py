"""The one public operation: add the LoRA paths of many adapters to a linear layer's output, with gradients.

`grouped_lora` adds to an output that is there; `grouped_lora_linears` makes the frozen products as well, for one layer
or for those that share an input. The implementation is chosen here and nowhere else: Triton kernels on a CUDA device
that can run them, the torch twin of `reference` everywhere else.

Shape suffixes: see `segments`.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.reference import lora_backward_, lora_forward_
from kernels.segments import Segments

if TYPE_CHECKING:
    from kernels.triton_lora import Projection

OVERLAP_TOKENS = 16384
"""Up to here projections that share an input run beside their frozen products; beyond, one after another."""
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def kernel_path(device: torch.device) -> str:
    """Name of the implementation that runs on this device, with the reason where a faster one exists."""
    if runs_on_triton(device):
        return f"Triton kernels on {device.type}"
    missing = " (Triton is not installed)" if device.type == "cuda" and not _has_triton() else ""
    return f"torch twin on {device.type}{missing}"


def runs_on_triton(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether the Triton kernels serve tensors of this device and dtype: CUDA from compute capability 8 on."""
    if device.type != "cuda" or dtype not in TRITON_DTYPES or not _has_triton():
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


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
    _check(tuple(base_TO.shape), x_TI, a_RI, b_RO, segments)
    inputs = (base_TO, x_TI, a_RI, b_RO, segments, layer_index, gradient_sinks)
    return _GroupedLora.apply(*inputs)


def _check(base_shape: tuple[int, ...], x_TI: Tensor, a_RI: Tensor, b_RO: Tensor, segments: Segments) -> None:
    expected = (x_TI.shape[0], b_RO.shape[1])
    if x_TI.dim() != 2 or base_shape != expected or a_RI.shape != (b_RO.shape[0], x_TI.shape[1]):
        shapes = f"base {base_shape}, x {tuple(x_TI.shape)}, A {tuple(a_RI.shape)}, B {tuple(b_RO.shape)}"
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
        ctx.on_triton = segments.count > 0 and runs_on_triton(x_TI.device, x_TI.dtype)
        if ctx.on_triton:
            from kernels.triton_lora import add_lora_

            shrunk = [add_lora_(base_TO, x_TI, a_RI, b_RO, segments, layer_index)]
        else:
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
        inputs = (dy_TO.contiguous(), x_TI, a_RI, b_RO, ctx.segments, ctx.layer_index)
        needs_dx = ctx.needs_input_grad[1]
        if ctx.on_triton:
            from kernels.triton_lora import lora_gradients_

            dx_TI = lora_gradients_(sinks[0], sinks[1], *inputs, shrunk[0], input_needs_gradient=needs_dx)
        else:
            dx_TI = lora_backward_(sinks[0], sinks[1], *inputs, shrunk, input_needs_gradient=needs_dx)
        da_RI, db_RO = (None, None) if ctx.gradient_sinks else sinks
        return dy_TO, dx_TI, da_RI, db_RO, None, None, None


def grouped_lora_linears(
    x_TI: Tensor,
    projections: Sequence[Projection],
    segments: Segments,
    *,
    accumulate: bool = True,
    overlap: bool | None = None,
) -> tuple[Tensor, ...]:
    """y = x W^T + bias + scale (drop(x) A^T) B of one to three frozen layers that read the same x; Triton only.

    Against `grouped_lora` after each layer it reads x once for all projections, and adds the LoRA part of dx into the
    frozen layers' own dx.

    Args:
        x_TI: contiguous, on a device that `runs_on_triton` is true for.
        projections: the layers with their adapters. Gradients of A and B go to their sinks alone.
        segments: the same for all projections.
        accumulate: False writes dA and dB instead of adding them; segments without tokens get exact zeros.
        overlap: run kernels beside the frozen products on further streams. None: where it was found to be faster,
            with few tokens or with one projection.

    Returns:
        y [T, O] of each projection. Differentiable once.
    """
    for p in projections:
        _check((x_TI.shape[0], p.weight_OI.shape[0]), x_TI, p.a_RI, p.b_RO, segments)
    if overlap is None:
        overlap = x_TI.shape[0] <= OVERLAP_TOKENS or len(projections) == 1
    return _GroupedLoraLinears.apply(x_TI, projections[0].a_RI, projections, segments, accumulate, overlap)


class _GroupedLoraLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        a_RI: Tensor,  # requires a gradient, so that backward runs where x does not
        projections: Sequence[Projection],
        segments: Segments,
        accumulate: bool,
        overlap: bool,
    ) -> tuple[Tensor, ...]:
        from kernels.triton_lora import forward_projections

        outputs, s_PTQ = forward_projections(x_TI, projections, segments, overlap=overlap)
        ctx.save_for_backward(x_TI, s_PTQ)
        ctx.projections, ctx.segments, ctx.accumulate, ctx.overlap = projections, segments, accumulate, overlap
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        from kernels.triton_lora import backward_projections

        x_TI, s_PTQ = ctx.saved_tensors
        dx_TI = backward_projections(
            [dy.contiguous() for dy in dy_TO],
            x_TI,
            s_PTQ,
            ctx.projections,
            ctx.segments,
            input_needs_gradient=ctx.needs_input_grad[0],
            accumulate=ctx.accumulate,
            overlap=ctx.overlap,
        )
        return dx_TI, None, None, None, None, None
