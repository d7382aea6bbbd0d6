"""out += scale S B in Triton with the add fused into the store; also dx += drop'(dS A), summed over projections.

One program owns BLOCK_TOKENS x BLOCK_WIDTH of the output, reads it once and writes it once, whatever the number of
projections. Programs run from the last tile to the first: what the product before wrote last still lies in the L2.

Shape suffixes: see `segments`, `triton_shrink`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.segments import Segments
from kernels.triton_tiles import dropped, load_mask_state, load_shrunk, locate_tile
from kernels.triton_tuning import NOT_SPECIALIZED, Tiles, choose_tiles, padded_segments, rank_block


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def expand_kernel(
    out, s, w0, w1, w2,
    token_offsets, rank_offsets, ranks, scales, dropouts, thresholds, seeds,
    num_segments, num_tokens, num_width_tiles, layer0, layer1, layer2,
    width, out_stride, w_stride, s_stride,
    PROJECTIONS: tl.constexpr, SCALED: tl.constexpr, DROPOUT: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_WIDTH: tl.constexpr, SEGMENTS: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    slot = program // num_width_tiles
    segment, first, start, end = locate_tile(token_offsets, num_segments, slot, BLOCK_TOKENS, SEGMENTS)
    if first >= end:
        return
    rank = tl.load(ranks + segment)
    if rank == 0:
        return
    t = tl.arange(0, BLOCK_TOKENS)
    r = tl.arange(0, BLOCK_RANK)
    feature = (program % num_width_tiles) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    live_t = first + t < end
    if EVEN:
        out_mask = live_t[:, None]
    else:
        out_mask = live_t[:, None] & (feature < width)[None, :]
    out_tile = out + first.to(tl.int64) * out_stride + t[:, None] * out_stride + feature[None, :]
    base = tl.load(out_tile, mask=out_mask, other=0.0)
    row = tl.load(rank_offsets + segment).to(tl.int64)
    plane = num_tokens.to(tl.int64) * s_stride
    s_rows = s + first.to(tl.int64) * s_stride + t[:, None] * s_stride
    if DROPOUT:
        seed, threshold, keep_scale = load_mask_state(seeds, thresholds, dropouts, segment)
    total = tl.zeros([BLOCK_TOKENS, BLOCK_WIDTH], tl.float32)
    for projection in tl.static_range(PROJECTIONS):
        w = w0 if projection == 0 else (w1 if projection == 1 else w2)
        if DROPOUT:
            acc = tl.zeros([BLOCK_TOKENS, BLOCK_WIDTH], tl.float32)
        else:
            acc = total
        for rank_start in range(0, rank, BLOCK_RANK):
            live_r = rank_start + r < rank
            s_tile = load_shrunk(
                s_rows + projection * SPLITS * plane + (rank_start + r)[None, :],
                live_t[:, None] & live_r[None, :], plane, SPLITS,
            ).to(base.dtype)  # fmt: skip
            w_rows = w + (row + rank_start + r.to(tl.int64))[:, None] * w_stride
            if EVEN:
                w_tile = tl.load(w_rows + feature[None, :], mask=live_r[:, None], other=0.0)
            else:
                w_tile = tl.load(
                    w_rows + feature[None, :], mask=live_r[:, None] & (feature < width)[None, :], other=0.0
                )
            acc = tl.dot(s_tile, w_tile.to(base.dtype), acc, input_precision=PRECISION)
        if DROPOUT:
            layer = layer0 if projection == 0 else (layer1 if projection == 1 else layer2)
            total += dropped(acc, seed, layer, first - start + t, feature, threshold, keep_scale)
        else:
            total = acc
    if SCALED:
        total *= tl.load(scales + segment)
    tl.store(out_tile, (base.to(tl.float32) + total).to(base.dtype), mask=out_mask)


def expand_(
    out_TO: Tensor,
    s_PKTQ: Tensor,
    weights_RO: Sequence[Tensor],
    segments: Segments,
    layer_indices: Sequence[int],
    *,
    scaled: bool = False,
    dropout: bool = False,
    tiles: Tiles | None = None,
) -> None:
    """Add the sum over projections of S B to `out_TO`, in place; tokens outside the segments stay as they are.

    Args:
        out_TO: rows contiguous; bfloat16, float16 or float32.
        s_PKTQ: from `shrink`, one plane per projection.
        weights_RO: one per projection, of one row stride; any float dtype.
        segments: of the T tokens.
        layer_indices: one per projection.
        scaled: multiply by the segment's scale.
        dropout: apply the layers' dropout masks over the output's columns.
        tiles: other than the table's.
    """
    count, (num_tokens, width) = len(weights_RO), out_TO.shape
    assert s_PKTQ.shape[0] == count
    assert all(w.stride() == weights_RO[0].stride() for w in weights_RO), "one row stride"
    tiles = tiles or choose_tiles("expand", num_tokens, width)
    block_width = min(tiles.block_width, max(16, triton.next_power_of_2(width)))
    num_width_tiles = triton.cdiv(width, block_width)
    slots = num_tokens // tiles.block_tokens + segments.count
    w = [*weights_RO, weights_RO[0], weights_RO[0]]
    layers = [*layer_indices, 0, 0]
    expand_kernel[(slots * num_width_tiles,)](
        out_TO, s_PKTQ, w[0], w[1], w[2], *segments.kernel_arguments,
        segments.count, num_tokens, num_width_tiles, layers[0], layers[1], layers[2],
        width, out_TO.stride(0), w[0].stride(0), s_PKTQ.stride(2),
        PROJECTIONS=count, SCALED=scaled, DROPOUT=dropout and segments.has_dropout, SPLITS=s_PKTQ.shape[1],
        BLOCK_TOKENS=tiles.block_tokens, BLOCK_RANK=rank_block(segments), BLOCK_WIDTH=block_width,
        SEGMENTS=padded_segments(segments), EVEN=width % block_width == 0,
        PRECISION="ieee" if out_TO.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
