"""The grouped LoRA operation in plain torch: the specification of every faster kernel, and the CPU path.

*Semantics*, for the tokens t of segment s with the rank rows r of its adapter:

    forward    S[t] = drop(x[t]) A[r]^T                  y[t]  = base[t] + scale_s S[t] B[r]
    backward   dS[t] = scale_s dy[t] B[r]^T              dx[t] = drop'(dS[t] A[r])
               dA[r] = dS[t]^T drop(x[t])                dB[r] = scale_s S[t]^T dy[t]         dbase = dy

A lies as PEFT's lora_A.weight ([R, I]), B transposed ([R, O]), so that one adapter is one block of rows in both.
Products are accumulated in float32 (float64 for float64 inputs). Tokens outside the segments pass unchanged; rank rows
without tokens get a gradient of exactly 0. One segment's values never enter another's.

Shape suffixes: see `segments`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.random_mask import keep_mask
from kernels.segments import HostSegment, Segments


def lora_forward_(
    base_TO: Tensor, x_TI: Tensor, a_RI: Tensor, b_RO: Tensor, segments: Segments, layer_index: int
) -> list[Tensor]:
    """Add every segment's LoRA path to `base_TO`, in place.

    Args:
        base_TO: output of the frozen layer; any float dtype. Becomes y.
        x_TI: input of the layer, same dtype.
        a_RI, b_RO: all adapters of this layer; any float dtype, converted to float32 (float64 with float64 inputs).
        segments: of the T tokens.
        layer_index: enters the dropout mask.

    Returns:
        S of each active segment, [t, r], for the backward pass.
    """
    shrunk = []
    for segment in segments.active:
        s_tr = _dropped(x_TI[segment.tokens], segment, layer_index) @ _accumulable(a_RI[segment.rank_rows]).T
        _add_product_(base_TO[segment.tokens], s_tr, _accumulable(b_RO[segment.rank_rows]), segment.scale)
        shrunk.append(s_tr)
    return shrunk


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
    """Gradients of the LoRA path; the base's own gradient is `dy_TO` itself.

    Args:
        da_RI, db_RO: dA and dB are added to these, in place; float32 (float64 with float64 inputs).
        dy_TO: gradient of y.
        shrunk: what `lora_forward_` returned.
        input_needs_gradient: False saves the work for dx.
        accumulate: False writes dA and dB instead; rank rows of segments without tokens get exact zeros.

    Returns:
        dx_TI in the dtype of x, or None.
    """
    if not accumulate:
        for segment in segments.on_host:
            da_RI[segment.rank_rows].zero_()
            db_RO[segment.rank_rows].zero_()
    dx_TI = torch.zeros_like(x_TI) if input_needs_gradient else None
    for segment, s_tr in zip(segments.active, shrunk, strict=True):
        rows = segment.rank_rows
        dy_tO = _accumulable(dy_TO[segment.tokens])
        db_RO[rows].addmm_(s_tr.T, dy_tO, alpha=segment.scale)
        ds_tr = (dy_tO @ _accumulable(b_RO[rows]).T).mul_(segment.scale)
        da_RI[rows].addmm_(ds_tr.T, _dropped(x_TI[segment.tokens], segment, layer_index))
        if dx_TI is not None:
            dx_TI[segment.tokens] = _drop_(ds_tr @ _accumulable(a_RI[rows]), segment, layer_index)
    return dx_TI


def _accumulable(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _add_product_(base_tO: Tensor, s_tr: Tensor, b_rO: Tensor, scale: float) -> None:
    """base += scale * S B, rounded once to the dtype of base."""
    if base_tO.dtype == s_tr.dtype:
        base_tO.addmm_(s_tr, b_rO, alpha=scale)
    else:
        base_tO.copy_(base_tO.to(s_tr.dtype).addmm_(s_tr, b_rO, alpha=scale))


def _dropped(x_tI: Tensor, segment: HostSegment, layer_index: int) -> Tensor:
    x_tI = _accumulable(x_tI)
    return _drop_(x_tI.clone(), segment, layer_index) if segment.dropout else x_tI


def _drop_(x_tI: Tensor, segment: HostSegment, layer_index: int) -> Tensor:
    """Zero the dropped elements and scale the others up, in place. Linear, so it serves the gradient as well."""
    if not segment.dropout:
        return x_tI
    keep_tI = keep_mask(
        seed=segment.dropout_seed,
        layer_index=layer_index,
        num_tokens=x_tI.shape[0],
        width=x_tI.shape[1],
        dropout=segment.dropout,
        device=x_tI.device,
    )
    return x_tI.masked_fill_(~keep_tI, 0.0).mul_(1.0 / (1.0 - segment.dropout))
