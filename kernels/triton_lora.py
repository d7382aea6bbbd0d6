"""The LoRA path of one frozen linear layer, or of two or three that share their input, on Triton kernels.

Forward: S = drop(x) A^T in one pass over x for all projections, and y += scale S B for each. Backward: dS = scale dy
B^T for each, dx += the sum of drop'(dS A) in one pass over dx, dB = scale S^T dy and dA = dS^T drop(x).

With `overlap` the kernels that do not need the frozen product run on two more streams beside it (`side_streams`). The
streams meet before a function returns, but for gradients that someone promised to wait for (`UnfinishedGradients`).

Shape suffixes: see `segments`, `triton_shrink`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.projections import Projection, add_frozen_dx
from kernels.segments import Segments
from kernels.side_streams import GRADIENTS, SHRINKS, UnfinishedGradients, beside, meet
from kernels.triton_expand import expand_
from kernels.triton_outer import outer_
from kernels.triton_shrink import new_shrunk, shrink


def forward_projections(
    x_TI: Tensor, projections: Sequence[Projection], segments: Sequence[Segments], *, overlap: bool
) -> tuple[tuple[Tensor, ...], Tensor]:
    """y [T, O] of each projection with its LoRA paths, and S [P, T, Q] for the backward pass.

    The projections' segments `differ_in_ranks_only`.
    """
    a, layers = [p.a_RI for p in projections], [p.layer_index for p in projections]
    with beside(x_TI, SHRINKS, overlap):
        s_PTQ = shrink(x_TI, a, segments, layers)
    if overlap:
        outputs = [functional.linear(x_TI, p.weight_OI, p.bias_O) for p in projections]
        meet(x_TI, (SHRINKS,))
    else:
        outputs = []
    for i, p in enumerate(projections):
        if not overlap:
            # Right before its expand, which then finds the last rows in the L2.
            outputs.append(functional.linear(x_TI, p.weight_OI, p.bias_O))
        expand_(outputs[i], s_PTQ[i : i + 1], [p.b_RO], segments[i : i + 1], layers[i : i + 1], scaled=True)
    return tuple(outputs), s_PTQ


def backward_projections(
    dy_TO: Sequence[Tensor],
    x_TI: Tensor,
    s_PTQ: Tensor,
    projections: Sequence[Projection],
    segments: Sequence[Segments],
    *,
    input_needs_gradient: bool,
    accumulate: bool,
    overlap: bool,
    unfinished: UnfinishedGradients | None = None,
) -> Tensor | None:
    """dx [T, I] of the frozen layers and the LoRA paths together; dA and dB go to the sinks.

    Args:
        unfinished: with `overlap`, dA and dB may still be running on return; it keeps what they read.
    """
    overlap, dx_TI = overlap and input_needs_gradient, None
    ds_PTQ = new_shrunk(x_TI, len(projections), segments[0])
    if overlap:
        with beside(x_TI, GRADIENTS) as gradients:
            for i in range(len(projections)):
                _add_db(i, dy_TO, s_PTQ, projections, segments, accumulate=accumulate)
        with beside(x_TI, SHRINKS) as shrinks:
            for i in range(len(projections)):
                _shrink_dy(i, dy_TO, ds_PTQ, projections, segments)
            assert shrinks is not None and gradients is not None
            ds_ready = shrinks.record_event()
            if unfinished is None:
                _add_da(x_TI, ds_PTQ, projections, segments, accumulate=accumulate)
        if unfinished is not None:
            # Not behind the shrinks: the next layer waits for its own there.
            with torch.cuda.stream(gradients):
                gradients.wait_event(ds_ready)
                _add_da(x_TI, ds_PTQ, projections, segments, accumulate=accumulate)
            unfinished.keep(x_TI, s_PTQ, ds_PTQ, *dy_TO)
        for dy, p in zip(dy_TO, projections, strict=True):
            dx_TI = add_frozen_dx(dx_TI, dy, p)
        torch.cuda.current_stream(x_TI.device).wait_event(ds_ready)
    else:
        # Each dy is read three times in a row and in turning directions, so that its last part is found in the L2.
        for i, (dy, p) in enumerate(zip(dy_TO, projections, strict=True)):
            if input_needs_gradient:
                dx_TI = add_frozen_dx(dx_TI, dy, p)
            _shrink_dy(i, dy_TO, ds_PTQ, projections, segments, reverse=True)
            _add_db(i, dy_TO, s_PTQ, projections, segments, accumulate=accumulate, reverse=False)
        _add_da(x_TI, ds_PTQ, projections, segments, accumulate=accumulate)
    if dx_TI is not None:
        layers = [p.layer_index for p in projections]
        expand_(dx_TI, ds_PTQ, [p.a_RI for p in projections], segments, layers, dropout=True)
    if overlap and unfinished is None:
        meet(x_TI, (SHRINKS, GRADIENTS))
    return dx_TI


def _shrink_dy(
    i: int,
    dy_TO: Sequence[Tensor],
    ds_PTQ: Tensor,
    projections: Sequence[Projection],
    segments: Sequence[Segments],
    *,
    reverse: bool = False,
) -> None:
    b_RO, layer, own = projections[i].b_RO, projections[i].layer_index, ds_PTQ[i : i + 1]
    shrink(dy_TO[i], [b_RO], segments[i : i + 1], [layer], scaled=True, dropout=False, reverse=reverse, into_PTQ=own)


def _add_db(
    i: int,
    dy_TO: Sequence[Tensor],
    s_PTQ: Tensor,
    projections: Sequence[Projection],
    segments: Sequence[Segments],
    *,
    accumulate: bool,
    reverse: bool = True,
) -> None:
    sink, layer = projections[i].gradient_sinks[1], projections[i].layer_index
    outer_(sink, dy_TO[i], s_PTQ[i], segments[i], layer, scaled=True, accumulate=accumulate, reverse=reverse)


def _add_da(
    x_TI: Tensor, ds_PTQ: Tensor, projections: Sequence[Projection], segments: Sequence[Segments], *, accumulate: bool
) -> None:
    for ds_TQ, p, own in zip(ds_PTQ, projections, segments, strict=True):
        outer_(p.gradient_sinks[0], x_TI, ds_TQ, own, p.layer_index, dropout=True, accumulate=accumulate)


def lora_forward_(
    base_TO: Tensor, x_TI: Tensor, a_RI: Tensor, b_RO: Tensor, segments: Segments, layer_index: int
) -> list[Tensor]:
    """`reference.lora_forward_` on kernels. Gives S [1, T, Q]."""
    s_PTQ = shrink(x_TI, [a_RI], [segments], [layer_index])
    expand_(base_TO, s_PTQ, [b_RO], [segments], [layer_index], scaled=True)
    return [s_PTQ]


def lora_backward_(
    da_RI: Tensor,
    db_RO: Tensor,
    dy_TO: Tensor,
    x_TI: Tensor,
    a_RI: Tensor,
    b_RO: Tensor,
    segments: Segments,
    layer_index: int,
    shrunk: list[Tensor],
    *,
    input_needs_gradient: bool = True,
    accumulate: bool = True,
) -> Tensor | None:
    """`reference.lora_backward_` on kernels, with what `lora_forward_` of this module gave."""
    ((s_TQ,),) = shrunk
    ds_PTQ = shrink(dy_TO, [b_RO], [segments], [layer_index], scaled=True, dropout=False)
    outer_(db_RO, dy_TO, s_TQ, segments, layer_index, scaled=True, accumulate=accumulate)
    outer_(da_RI, x_TI, ds_PTQ[0], segments, layer_index, dropout=True, accumulate=accumulate)
    if not input_needs_gradient:
        return None
    dx_TI = torch.zeros_like(x_TI)
    expand_(dx_TI, ds_PTQ, [a_RI], [segments], [layer_index], dropout=True)
    return dx_TI
