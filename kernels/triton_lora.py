"""The LoRA path of one frozen linear layer, or of two or three that share their input, on Triton kernels.

Forward: S = drop(x) A^T in one pass over x for all projections, and y += scale S B for each. Backward: dS = scale dy B^T
for each, dx += the sum of drop'(dS A) in one pass over dx, dB = scale S^T dy and dA = dS^T drop(x).

With `overlap` the kernels that do not need the frozen product run on a second stream beside it: shrinks and gradients
wait for memory while the product waits for the tensor cores. Both streams meet before a function returns, so tensors
never outlive their stream.

Shape suffixes: see `segments`, `triton_shrink`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.segments import Segments
from kernels.triton_expand import expand_
from kernels.triton_outer import outer_
from kernels.triton_shrink import new_shrunk, shrink
from kernels.triton_tuning import choose_tiles


@dataclass(frozen=True, kw_only=True, eq=False)
class Projection:
    """A frozen linear layer and its adapters."""

    weight_OI: Tensor
    """As torch stores it; the transposed view of a Conv1D's weight serves as well."""
    bias_O: Tensor | None
    a_RI: Tensor
    """Any float dtype; the compute dtype is fastest, since float32 rows are converted by every tile that reads them."""
    b_RO: Tensor
    layer_index: int
    gradient_sinks: tuple[Tensor, Tensor]
    """float32 [R, I] and [R, O]; dA and dB go here."""


def forward_projections(
    x_TI: Tensor, projections: Sequence[Projection], segments: Segments, *, overlap: bool
) -> tuple[tuple[Tensor, ...], Tensor]:
    """y [T, O] of each projection with its LoRA paths, and S [P, K, T, Q] for the backward pass."""
    a, layers = [p.a_RI for p in projections], [p.layer_index for p in projections]
    with _beside(x_TI, overlap):
        s_PKTQ = shrink(x_TI, a, segments, layers)
    outputs = tuple(functional.linear(x_TI, p.weight_OI, p.bias_O) for p in projections)
    _meet(x_TI, overlap)
    for i, (y_TO, p) in enumerate(zip(outputs, projections, strict=True)):
        expand_(y_TO, s_PKTQ[i : i + 1], [p.b_RO], segments, layers[i : i + 1], scaled=True)
    return outputs, s_PKTQ


def backward_projections(
    dy_TO: Sequence[Tensor],
    x_TI: Tensor,
    s_PKTQ: Tensor,
    projections: Sequence[Projection],
    segments: Segments,
    *,
    input_needs_gradient: bool,
    accumulate: bool,
    overlap: bool,
) -> Tensor | None:
    """dx [T, I] of the frozen layers and the LoRA paths together; dA and dB go to the sinks."""
    overlap = overlap and input_needs_gradient
    with _beside(x_TI, overlap) as side:
        ds_PKTQ = _shrink_gradients(dy_TO, projections, segments)
        ds_ready = side.record_event() if side is not None else None
        for i, (dy, p) in enumerate(zip(dy_TO, projections, strict=True)):
            outer_(
                p.gradient_sinks[1], dy, s_PKTQ[i], segments, p.layer_index, scaled=True, accumulate=accumulate
            )
            outer_(p.gradient_sinks[0], x_TI, ds_PKTQ[i], segments, p.layer_index, dropout=True, accumulate=accumulate)
    dx_TI = None
    if input_needs_gradient:
        dx_TI = dy_TO[0] @ projections[0].weight_OI
        for dy, p in zip(dy_TO[1:], projections[1:], strict=True):
            dx_TI.addmm_(dy, p.weight_OI)
        if ds_ready is not None:
            torch.cuda.current_stream(x_TI.device).wait_event(ds_ready)
        layers = [p.layer_index for p in projections]
        expand_(dx_TI, ds_PKTQ, [p.a_RI for p in projections], segments, layers, dropout=True)
    _meet(x_TI, overlap)
    return dx_TI


def add_lora_(
    base_TO: Tensor, x_TI: Tensor, a_RI: Tensor, b_RO: Tensor, segments: Segments, layer_index: int
) -> Tensor:
    """`reference.lora_forward_` on kernels: base becomes y; gives S [1, K, T, Q]."""
    s_PKTQ = shrink(x_TI, [a_RI], segments, [layer_index])
    expand_(base_TO, s_PKTQ, [b_RO], segments, [layer_index], scaled=True)
    return s_PKTQ


def lora_gradients_(
    da_RI: Tensor,
    db_RO: Tensor,
    dy_TO: Tensor,
    x_TI: Tensor,
    a_RI: Tensor,
    b_RO: Tensor,
    segments: Segments,
    layer_index: int,
    s_PKTQ: Tensor,
    *,
    input_needs_gradient: bool = True,
) -> Tensor | None:
    """`reference.lora_backward_` on kernels, with the S of `add_lora_`."""
    ds_PKTQ = shrink(dy_TO, [b_RO], segments, [layer_index], scaled=True, dropout=False)
    outer_(db_RO, dy_TO, s_PKTQ[0], segments, layer_index, scaled=True)
    outer_(da_RI, x_TI, ds_PKTQ[0], segments, layer_index, dropout=True)
    if not input_needs_gradient:
        return None
    dx_TI = torch.zeros_like(x_TI)
    expand_(dx_TI, ds_PKTQ, [a_RI], segments, [layer_index], dropout=True)
    return dx_TI


def _shrink_gradients(dy_TO: Sequence[Tensor], projections: Sequence[Projection], segments: Segments) -> Tensor:
    """dS of each projection, in one buffer and cut alike, so that one pass over dx can add them all."""
    splits = min(choose_tiles("shrink", *dy.shape).splits for dy in dy_TO)
    ds_PKTQ = new_shrunk(dy_TO[0], len(projections), segments, splits)
    for i, (dy, p) in enumerate(zip(dy_TO, projections, strict=True)):
        shrink(
            dy, [p.b_RO], segments, [p.layer_index], scaled=True, dropout=False, into_PKTQ=ds_PKTQ[i : i + 1]
        )
    return ds_PKTQ


@functools.lru_cache(maxsize=16)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _beside(x: Tensor, overlap: bool) -> Iterator[torch.cuda.Stream | None]:
    """Enqueue what follows on a second stream, after all that the current one holds so far."""
    if not overlap:
        yield None
        return
    side = _side_stream(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        yield side


def _meet(x: Tensor, overlap: bool) -> None:
    if overlap:
        torch.cuda.current_stream(x.device).wait_stream(_side_stream(x.device))
