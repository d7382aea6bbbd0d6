"""The one public operation: add the LoRA paths of many adapters to a linear layer's output, with gradients.

`grouped_lora` adds to an output that is there; `grouped_lora_linears` makes the frozen products as well, for one layer
or for those that share an input. `path_choice` says which implementation runs, for both and nowhere else.

Shape suffixes: see `segments`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import reference, torch_grouped
from kernels.path_choice import Implementation, choose_path
from kernels.projections import OneLayer, Projection, backward_one_by_one, forward_one_by_one
from kernels.segments import Segments
from kernels.side_streams import UnfinishedGradients

OVERLAP_TOKENS = 16384
"""Up to here projections that share an input run beside their frozen products; beyond, one after another."""


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
        a_RI: lora_A rows of all adapters; any row stride.
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


def _choose(x_TI: Tensor, segments: Segments) -> Implementation:
    # Without segments there is nothing to launch a kernel for.
    return choose_path(x_TI.device, x_TI.dtype).implementation if segments.count else Implementation.TWIN


def _module_of(chosen: Implementation) -> OneLayer:
    if chosen is Implementation.TRITON:
        from kernels import triton_lora  # cannot be imported without Triton

        return triton_lora
    return torch_grouped if chosen is Implementation.TORCH_GROUPED else reference


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
        ctx.module = _module_of(_choose(x_TI, segments))
        shrunk = ctx.module.lora_forward_(base_TO, x_TI, a_RI, b_RO, segments, layer_index)
        ctx.mark_dirty(base_TO)
        ctx.save_for_backward(x_TI, a_RI, b_RO, *shrunk)
        ctx.segments, ctx.layer_index, ctx.gradient_sinks = segments, layer_index, gradient_sinks
        return base_TO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, a_RI, b_RO, *shrunk = ctx.saved_tensors
        sinks = ctx.gradient_sinks or tuple(torch.zeros(m.shape, dtype=m.dtype, device=m.device) for m in (a_RI, b_RO))
        inputs = (dy_TO.contiguous(), x_TI, a_RI, b_RO, ctx.segments, ctx.layer_index, shrunk)
        needs_dx = ctx.needs_input_grad[1]
        dx_TI = ctx.module.lora_backward_(*sinks, *inputs, input_needs_gradient=needs_dx)
        da_RI, db_RO = (None, None) if ctx.gradient_sinks else sinks
        return dy_TO, dx_TI, da_RI, db_RO, None, None, None


def grouped_lora_linears(
    x_TI: Tensor,
    projections: Sequence[Projection],
    segments: Segments | Sequence[Segments],
    *,
    accumulate: bool = True,
    overlap: bool | None = None,
    unfinished: UnfinishedGradients | None = None,
) -> tuple[Tensor, ...]:
    """y = x W^T + bias + scale (drop(x) A^T) B of one to three frozen layers that read the same x.

    Against `grouped_lora` after each layer the Triton kernels read x once for all projections, and add the LoRA part of
    dx into the frozen layers' own dx. Elsewhere the layers run one after another.

    Args:
        x_TI: contiguous.
        projections: the layers with their adapters. Gradients of A and B go to their sinks alone.
        segments: the same for all projections, or one for each where an adapter may be on some of the layers only:
            then all made from one `Segments` by `without`.
        accumulate: False writes dA and dB instead of adding them; segments without tokens get exact zeros.
        overlap: run Triton kernels beside the frozen products on further streams. None: where it was found to be
            faster, with few tokens or with one projection.
        unfinished: lets the Triton kernels of dA and dB run on beside the layers that follow. The caller finishes them.

    Returns:
        y [T, O] of each projection. Differentiable once.

    Raises:
        ValueError: the shapes and the segments do not fit, or the segments of two projections differ in more than
            which of them have an adapter.
    """
    each = (segments,) * len(projections) if isinstance(segments, Segments) else tuple(segments)
    if not 1 <= len(projections) <= 3 or len(each) != len(projections):
        raise ValueError(
            "grouped_lora_linears expects one to three projections, and segments for all or for each, but got "
            f"{len(projections)} projections and {len(each)} segments"
        )
    for p, own in zip(projections, each, strict=True):
        _check((x_TI.shape[0], p.d_out), x_TI, p.a_RI, p.b_RO, own)
        if not own.differ_in_ranks_only(each[0]):
            raise ValueError(
                "grouped_lora_linears expects segments of one layout, but those of two projections differ in more than "
                "which adapters they have: make both from one Segments by `without`"
            )
    if overlap is None:
        overlap = x_TI.shape[0] <= OVERLAP_TOKENS or len(projections) == 1
    return _GroupedLoraLinears.apply(x_TI, projections[0].a_RI, projections, each, accumulate, overlap, unfinished)


class _GroupedLoraLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        a_RI: Tensor,  # requires a gradient, so that backward runs where x does not
        projections: Sequence[Projection],
        segments: Sequence[Segments],
        accumulate: bool,
        overlap: bool,
        unfinished: UnfinishedGradients | None,
    ) -> tuple[Tensor, ...]:
        ctx.projections, ctx.segments, ctx.accumulate, ctx.overlap = projections, segments, accumulate, overlap
        ctx.unfinished = unfinished
        ctx.chosen = _choose(x_TI, segments[0])
        if ctx.chosen is Implementation.TRITON:
            from kernels.triton_lora import forward_projections

            outputs, s_PTQ = forward_projections(x_TI, projections, segments, overlap=overlap)
            ctx.save_for_backward(x_TI, s_PTQ)
            return outputs
        outputs, shrunk = forward_one_by_one(_module_of(ctx.chosen), x_TI, projections, segments)
        ctx.saved_counts = [len(saved) for saved in shrunk]
        ctx.save_for_backward(x_TI, *(s for saved in shrunk for s in saved))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, *saved = ctx.saved_tensors
        dy_TO = tuple(dy.contiguous() for dy in dy_TO)
        options = {"input_needs_gradient": ctx.needs_input_grad[0], "accumulate": ctx.accumulate}
        if ctx.chosen is Implementation.TRITON:
            from kernels.triton_lora import backward_projections

            inputs = (dy_TO, x_TI, *saved, ctx.projections, ctx.segments)
            dx_TI = backward_projections(*inputs, overlap=ctx.overlap, unfinished=ctx.unfinished, **options)
        else:
            rest = iter(saved)
            shrunk = [list(itertools.islice(rest, count)) for count in ctx.saved_counts]
            inputs = (_module_of(ctx.chosen), dy_TO, x_TI, shrunk, ctx.projections, ctx.segments)
            dx_TI = backward_one_by_one(*inputs, **options)
        return dx_TI, None, None, None, None, None, None
