"""The LoRA path of one frozen linear layer, or of two or three that share their input, on Triton kernels.

Forward: S = drop(x) A^T in one pass over x for all projections, and y += scale S B for each. Backward: dS = scale dy
B^T for each, dx += the sum of drop'(dS A) in one pass over dx, dB = scale S^T dy and dA = dS^T drop(x).

With `overlap` the kernels that do not need the frozen product run on two more streams beside it: shrinks and gradients
wait for memory while the product waits for the tensor cores. The streams meet before a function returns, and side
streams begin by waiting for the current one, so no tensor's memory is used again too early.

Shape suffixes: see `segments`, `triton_shrink`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.projections import Projection, add_frozen_dx
from kernels.segments import Segments
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
    with _beside(x_TI, 0, overlap):
        s_PTQ = shrink(x_TI, a, segments, layers)
    if overlap:
        outputs = [functional.linear(x_TI, p.weight_OI, p.bias_O) for p in projections]
        _meet(x_TI, (0,))
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
) -> Tensor | None:
    """dx [T, I] of the frozen layers and the LoRA paths together; dA and dB go to the sinks."""
    overlap, dx_TI = overlap and input_needs_gradient, None
    ds_PTQ = new_shrunk(x_TI, len(projections), segments[0])
    if overlap:
        with _beside(x_TI, 1, overlap):
            for i in range(len(projections)):
                _add_db(i, dy_TO, s_PTQ, projections, segments, accumulate=accumulate)
        with _beside(x_TI, 0, overlap) as side:
            for i in range(len(projections)):
                _shrink_dy(i, dy_TO, ds_PTQ, projections, segments)
            assert side is not None
            ds_ready = side.record_event()
            _add_da(x_TI, ds_PTQ, projections, segments, accumulate=accumulate)
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
    if overlap:
        _meet(x_TI, (0, 1))
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


@functools.lru_cache(maxsize=64)
def _side_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _beside(x: Tensor, number: int, overlap: bool) -> Iterator[torch.cuda.Stream | None]:
    """Enqueue what follows on a side stream, after all that the current one holds so far."""
    if not overlap:
        yield None
        return
    side = _side_stream(x.device, number)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        yield side


def _meet(x: Tensor, numbers: Sequence[int]) -> None:
    for number in numbers:
        torch.cuda.current_stream(x.device).wait_stream(_side_stream(x.device, number))
