"""The grouped LoRA operation in torch's batched products, for CUDA devices that the Triton kernels do not serve.

The tokens of all segments are packed into rows, the rank rows of all adapters into equal blocks, and every step of
`reference` becomes one product over all segments: `grouped_mm` on ragged rows where torch has a kernel for it, else
`bmm` on rows padded to the longest segment. So the number of launches does not grow with the number of adapters; what
grows is the padding, of ranks to the largest and, for `bmm`, of tokens to the longest segment.

A padding row repeats its own segment's last token and a padding rank its own adapter's first rank row; their S and dS
are set to 0. Nothing of one segment therefore meets a value of another, NaN included.

Shape suffixes: see `segments`; J active segments, N packed rows, Q the largest rank rounded up to 16, n or q those of
N or J * Q that are no padding.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.random_mask import keep_mask_of_rows
from kernels.segments import Segments

GROUPED_MM_CAPABILITIES = (9, 10)
"""Where torch's grouped_mm is one kernel; elsewhere it falls back to a loop that waits for the device."""


def lora_forward_(
    base_TO: Tensor, x_TI: Tensor, a_RI: Tensor, b_RO: Tensor, segments: Segments, layer_index: int
) -> list[Tensor]:
    """`reference.lora_forward_`, in the dtype of x. Gives the scaled S [N, Q] of all segments as one tensor."""
    if not segments.active:
        return []
    packing = _pack_segments(segments, is_padded=not _serves_grouped_mm(x_TI, base_TO))
    x_NI = packing.dropped(packing.packed(x_TI), layer_index)
    s_NQ = packing.scaled(packing.times(x_NI, packing.blocks(a_RI, x_TI).transpose(1, 2)))
    base_TO.add_(packing.unpacked(packing.times(s_NQ, packing.blocks(b_RO, x_TI))))
    return [s_NQ]


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
    """`reference.lora_backward_`, with what `lora_forward_` of this module gave."""
    packing = _pack_segments(segments, is_padded=not _serves_grouped_mm(x_TI, dy_TO))
    if not accumulate:
        for sink in (da_RI, db_RO):
            sink.index_fill_(0, packing.overwritten_rows, 0.0)
    if not segments.active:
        return torch.zeros_like(x_TI) if input_needs_gradient else None
    (s_NQ,) = shrunk
    dy_NO = packing.packed(dy_TO)
    packing.add_blocks_(db_RO, packing.outer(s_NQ, dy_NO))
    ds_NQ = packing.scaled(packing.times(dy_NO, packing.blocks(b_RO, x_TI).transpose(1, 2)))
    packing.add_blocks_(da_RI, packing.outer(ds_NQ, packing.dropped(packing.packed(x_TI), layer_index)))
    if not input_needs_gradient:
        return None
    return packing.unpacked(packing.dropped(packing.times(ds_NQ, packing.blocks(a_RI, x_TI)), layer_index))


def _serves_grouped_mm(x_TI: Tensor, y_TO: Tensor) -> bool:
    if not x_TI.is_cuda or x_TI.dtype != torch.bfloat16 or torch.version.hip is not None:
        return False
    is_aligned = x_TI.shape[1] % 8 == 0 and y_TO.shape[1] % 8 == 0  # rows begin at multiples of 16 bytes
    return is_aligned and torch.cuda.get_device_capability(x_TI.device)[0] in GROUPED_MM_CAPABILITIES


@dataclass(frozen=True, kw_only=True, eq=False)
class _Packing:
    """Where the segments' tokens and rank rows go, as index tensors, and the products over them."""

    num_blocks: int
    ends_J: Tensor | None
    """int32, the end of each segment's packed rows for `grouped_mm`; None for `bmm` over equal blocks."""
    token_N: Tensor | None
    """Token of each packed row; None where the rows are the tokens as they lie."""
    row_T: Tensor
    """Packed row of each token, any for tokens without an adapter."""
    has_no_adapter_T1: Tensor | None
    """None where every token has one."""
    is_padding_NQ: Tensor
    scale_N1: Tensor
    rank_row_JQ: Tensor
    """Flat: rank row of each row of the blocks."""
    place_q: Tensor
    """Rows of the flattened blocks that are no padding."""
    rank_row_q: Tensor
    overwritten_rows: Tensor
    """Rank rows of all segments, those without tokens included."""
    mask_N: tuple[Tensor, Tensor, Tensor] | None
    """Dropout seed, token in the segment, threshold, as `keep_mask_of_rows` takes them; None without dropout."""
    keep_scale_N1: Tensor
    """float32, 1 / (1 - dropout)."""

    def packed(self, x_TI: Tensor) -> Tensor:
        return x_TI if self.token_N is None else x_TI.index_select(0, self.token_N)

    def unpacked(self, x_NI: Tensor) -> Tensor:
        """[T, I], with zeros for tokens without an adapter. May be `x_NI` itself."""
        x_TI = x_NI if self.token_N is None else x_NI.index_select(0, self.row_T)
        return x_TI if self.has_no_adapter_T1 is None else x_TI.masked_fill_(self.has_no_adapter_T1, 0.0)

    def dropped(self, x_NI: Tensor, layer_index: int) -> Tensor:
        if self.mask_N is None:
            return x_NI
        keep_NI = keep_mask_of_rows(*self.mask_N, layer_index=layer_index, width=x_NI.shape[1])
        return (x_NI * self.keep_scale_N1.to(_wide(x_NI))).masked_fill_(~keep_NI, 0.0).to(x_NI.dtype)

    def scaled(self, s_NQ: Tensor) -> Tensor:
        return (s_NQ * self.scale_N1.to(_wide(s_NQ))).to(s_NQ.dtype).masked_fill_(self.is_padding_NQ, 0.0)

    def blocks(self, a_RI: Tensor, like: Tensor) -> Tensor:
        """[J, Q, I] in the dtype of `like`."""
        return a_RI.index_select(0, self.rank_row_JQ).to(like.dtype).view(self.num_blocks, -1, a_RI.shape[1])

    def add_blocks_(self, sink_RI: Tensor, blocks_JQI: Tensor) -> None:
        sink_RI.index_add_(0, self.rank_row_q, blocks_JQI.flatten(0, 1)[self.place_q].to(sink_RI.dtype))

    def times(self, v_NK: Tensor, w_JKM: Tensor) -> Tensor:
        """[N, M]: each segment's rows times its block."""
        if self.ends_J is not None:
            return functional.grouped_mm(v_NK, w_JKM, offs=self.ends_J)
        return torch.bmm(v_NK.view(self.num_blocks, -1, v_NK.shape[1]), w_JKM).flatten(0, 1)

    def outer(self, s_NQ: Tensor, x_NI: Tensor) -> Tensor:
        """[J, Q, I]: S^T x of each segment."""
        if self.ends_J is not None:
            return functional.grouped_mm(s_NQ.T, x_NI, offs=self.ends_J)
        s_JLQ, x_JLI = (v.view(self.num_blocks, -1, v.shape[1]) for v in (s_NQ, x_NI))
        return torch.bmm(s_JLQ.transpose(1, 2), x_JLI)


def _wide(x: Tensor) -> torch.dtype:
    """Factors are applied in float32 at least, and rounded once."""
    return torch.promote_types(x.dtype, torch.float32)


@functools.lru_cache(maxsize=8)
def _pack_segments(segments: Segments, *, is_padded: bool) -> _Packing:
    """Made on the host from the plain values, once for all layers of a step with the same adapters."""
    active, device = segments.active, segments.token_offsets_S1.device

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    counts_J, ranks_J = column([s.num_tokens for s in active]), column([s.lora_rank for s in active])
    starts_J = column([s.token_start for s in active])
    longest = max((s.num_tokens for s in active), default=0)
    rows_J = torch.full_like(counts_J, longest) if is_padded else counts_J
    ends_J = rows_J.cumsum(0)
    segment_N = torch.arange(len(active)).repeat_interleave(rows_J)
    position_N = torch.arange(len(segment_N)) - (ends_J - rows_J)[segment_N]
    is_real_N = position_N < counts_J[segment_N]
    token_N = starts_J[segment_N] + position_N.minimum(counts_J[segment_N] - 1)
    row_T = torch.zeros(segments.num_tokens, dtype=torch.int64)
    row_T[token_N[is_real_N]] = is_real_N.nonzero().flatten()
    has_no_adapter_T = torch.ones(segments.num_tokens, dtype=torch.bool)
    has_no_adapter_T[token_N] = False

    rank_width = -(-max((s.lora_rank for s in active), default=0) // 16) * 16
    is_live_JQ = torch.arange(rank_width) < ranks_J[:, None]
    rank_row_JQ = column([s.rank_start for s in active])[:, None] + torch.arange(rank_width) * is_live_JQ
    overwritten = [torch.arange(s.rank_start, s.rank_start + s.lora_rank) for s in segments.on_host]
    keeps_order = len(token_N) == segments.num_tokens and torch.equal(token_N, torch.arange(len(token_N)))
    return _Packing(
        num_blocks=len(active),
        ends_J=None if is_padded else ends_J.int().to(device),
        token_N=None if keeps_order else token_N.to(device),
        row_T=row_T.to(device),
        has_no_adapter_T1=has_no_adapter_T[:, None].to(device) if has_no_adapter_T.any() else None,
        is_padding_NQ=~(is_real_N[:, None] & is_live_JQ[segment_N]).to(device),
        scale_N1=_per_row([s.scale for s in active], segment_N).to(device),
        rank_row_JQ=rank_row_JQ.flatten().to(device),
        place_q=is_live_JQ.flatten().nonzero().flatten().to(device),
        rank_row_q=rank_row_JQ[is_live_JQ].to(device),
        overwritten_rows=torch.cat([*overwritten, column([])]).to(device),
        mask_N=_mask_state(segments, segment_N, position_N) if any(s.dropout for s in active) else None,
        keep_scale_N1=_per_row([1 / (1 - s.dropout) for s in active], segment_N).to(device),
    )


def _per_row(values: list[float], segment_N: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[segment_N][:, None]


def _mask_state(segments: Segments, segment_N: Tensor, position_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    device = segments.token_offsets_S1.device
    active_J = torch.tensor([i for i, s in enumerate(segments.on_host) if s.is_active])
    index_N = active_J[segment_N].to(device)
    return segments.dropout_seeds_S[index_N], position_N.int().to(device), segments.dropout_thresholds_S[index_N]
