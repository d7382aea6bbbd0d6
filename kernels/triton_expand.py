"""out += scale S B in Triton with the add fused into the store; also dx += drop'(dS A), summed over projections.

One program owns BLOCK_TOKENS rows of WIDTH_TILES neighbouring tiles of the output, reads and writes them once,
whatever the number of projections. For a rank of one tile, S stays in registers and the tiles are loaded ahead; larger
ranks take a loop over rank tiles. Programs run from the last tile to the first: what the product before wrote last
still lies in the L2.

Shape suffixes: see `segments`, `triton_shrink`.
"""

from __future__ import annotations

# mypy: disallow-untyped-defs=False
# Triton infers the types of what it compiles.
from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from kernels.segments import Segments
from kernels.triton_tiles import differ, dropped, load_mask_state, load_ranks, locate_tile, ranks_of_others
from kernels.triton_tuning import NOT_SPECIALIZED, Tiles, choose_tiles, fit_width, padded_segments, rank_block


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def expand_kernel(
    out, s, w0, w1, w2,
    token_offsets, rank_offsets, ranks, scales, dropouts, thresholds, seeds, ranks1, ranks2,
    num_segments, num_tokens, num_width_tiles, layer0, layer1, layer2,
    width, out_stride, w_stride, s_stride,
    PROJECTIONS: tl.constexpr, SCALED: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_WIDTH: tl.constexpr, SEGMENTS: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, WIDTH_TILES: tl.constexpr, STAGES: tl.constexpr,
    OWN_RANKS: tl.constexpr, RANK_LOOP: tl.constexpr,
):  # fmt: skip
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    slot = program // num_width_tiles
    segment, first, start, end = locate_tile(token_offsets, num_segments, slot, BLOCK_TOKENS, SEGMENTS)
    if first >= end:
        return
    rank, rank0, rank1, rank2 = load_ranks(ranks, ranks1, ranks2, segment, PROJECTIONS, OWN_RANKS)
    if rank == 0:
        return
    t = tl.arange(0, BLOCK_TOKENS)
    r = tl.arange(0, BLOCK_RANK)
    live_t = first + t < end
    column = (program % num_width_tiles) * (BLOCK_WIDTH * WIDTH_TILES)
    out_rows = out + first.to(tl.int64) * out_stride + t[:, None] * out_stride
    row = tl.load(rank_offsets + segment).to(tl.int64)
    row_step = tl.zeros([], tl.int64) + w_stride
    w_rows = (row + r)[:, None] * row_step
    plane = num_tokens.to(tl.int64) * s_stride
    s_rows = s + first.to(tl.int64) * s_stride + t[:, None] * s_stride + r[None, :]
    scale = 1.0
    if SCALED:
        scale = tl.load(scales + segment)
    if DROPOUT:
        seed, threshold, keep_scale = load_mask_state(seeds, thresholds, dropouts, segment)
    fits = True
    if RANK_LOOP:
        fits = rank <= BLOCK_RANK
    if fits:
        live_r = r < rank
        s_mask = live_t[:, None] & live_r[None, :]
        dtype = out.dtype.element_ty
        own_mask = s_mask & (r < rank0)[None, :] if OWN_RANKS else s_mask
        s0 = tl.load(s_rows, mask=own_mask, other=0.0)
        s1 = s0
        s2 = s0
        if PROJECTIONS > 1:
            own_mask = s_mask & (r < rank1)[None, :] if OWN_RANKS else s_mask
            s1 = tl.load(s_rows + plane, mask=own_mask, other=0.0)
        if PROJECTIONS > 2:
            own_mask = s_mask & (r < rank2)[None, :] if OWN_RANKS else s_mask
            s2 = tl.load(s_rows + 2 * plane, mask=own_mask, other=0.0)
        for tile in tl.range(0, WIDTH_TILES, num_stages=STAGES):
            feature = column + tile * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
            if EVEN:
                out_mask, w_mask = live_t[:, None], live_r[:, None]
            else:
                out_mask, w_mask = (
                    live_t[:, None] & (feature < width)[None, :],
                    live_r[:, None] & (feature < width)[None, :],
                )
            base = tl.load(out_rows + feature[None, :], mask=out_mask, other=0.0)
            total = tl.zeros([BLOCK_TOKENS, BLOCK_WIDTH], tl.float32)
            for projection in tl.static_range(PROJECTIONS):
                w = w0 if projection == 0 else (w1 if projection == 1 else w2)
                s_tile = s0 if projection == 0 else (s1 if projection == 1 else s2)
                own_rank = rank0 if projection == 0 else (rank1 if projection == 1 else rank2)
                own_w_mask = w_mask & (r < own_rank)[:, None] if OWN_RANKS else w_mask
                w_tile = tl.load(w + w_rows + feature[None, :], mask=own_w_mask, other=0.0).to(dtype)
                if DROPOUT:
                    layer = layer0 if projection == 0 else (layer1 if projection == 1 else layer2)
                    acc = tl.dot(s_tile, w_tile, input_precision=PRECISION)
                    total += dropped(acc, seed, layer, first - start + t, feature, threshold, keep_scale)
                else:
                    total = tl.dot(s_tile, w_tile, total, input_precision=PRECISION)
            tl.store(out_rows + feature[None, :], (base.to(tl.float32) + scale * total).to(dtype), mask=out_mask)
    else:
        for tile in range(0, WIDTH_TILES):
            feature = column + tile * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
            out_mask = live_t[:, None] & (feature < width)[None, :]
            base = tl.load(out_rows + feature[None, :], mask=out_mask, other=0.0)
            total = tl.zeros([BLOCK_TOKENS, BLOCK_WIDTH], tl.float32)
            for projection in tl.static_range(PROJECTIONS):
                w = w0 if projection == 0 else (w1 if projection == 1 else w2)
                own_rank = rank0 if projection == 0 else (rank1 if projection == 1 else rank2)
                acc = tl.zeros([BLOCK_TOKENS, BLOCK_WIDTH], tl.float32)
                for rank_start in range(0, own_rank, BLOCK_RANK):
                    live_r = rank_start + r < own_rank
                    s_tile = tl.load(
                        s_rows + projection * plane + rank_start, mask=live_t[:, None] & live_r[None, :], other=0.0
                    )
                    w_tile = tl.load(
                        w + w_rows + rank_start * row_step + feature[None, :],
                        mask=live_r[:, None] & (feature < width)[None, :], other=0.0,
                    ).to(base.dtype)  # fmt: skip
                    acc = tl.dot(s_tile, w_tile, acc, input_precision=PRECISION)
                if DROPOUT:
                    layer = layer0 if projection == 0 else (layer1 if projection == 1 else layer2)
                    acc = dropped(acc, seed, layer, first - start + t, feature, threshold, keep_scale)
                total += acc
            tl.store(out_rows + feature[None, :], (base.to(tl.float32) + scale * total).to(base.dtype), mask=out_mask)


def expand_(
    out_TO: Tensor,
    s_PTQ: Tensor,
    weights_RO: Sequence[Tensor],
    segments: Sequence[Segments],
    layer_indices: Sequence[int],
    *,
    scaled: bool = False,
    dropout: bool = False,
    tiles: Tiles | None = None,
) -> None:
    """Add the sum over projections of S B to `out_TO`, in place; tokens outside the segments stay as they are.

    Args:
        out_TO: rows contiguous; bfloat16, float16 or float32.
        s_PTQ: from `shrink`, one plane per projection.
        weights_RO: one per projection, of one row stride; any float dtype.
        segments: of the T tokens, one per projection; they `differ_in_ranks_only`.
        layer_indices: one per projection.
        scaled: multiply by the segment's scale.
        dropout: apply the layers' dropout masks over the output's columns.
        tiles: other than the table's.
    """
    count, (num_tokens, width), first = len(weights_RO), out_TO.shape, segments[0]
    assert s_PTQ.shape[0] == count
    assert all(w.stride() == weights_RO[0].stride() for w in weights_RO), "one row stride"
    tiles = tiles or choose_tiles("expand", num_tokens, width, count)
    block = rank_block(first)
    column = tiles.block_tokens * out_TO.element_size() + count * block * weights_RO[0].element_size()
    block_width = fit_width(tiles.block_width, column, tiles.num_stages, 110_000)
    block_width = min(block_width, max(16, triton.next_power_of_2(width)))
    width_tiles = min(tiles.width_tiles, triton.cdiv(width, block_width))
    num_width_tiles = triton.cdiv(width, block_width * width_tiles)
    slots = num_tokens // tiles.block_tokens + first.count
    w = [*weights_RO, weights_RO[0], weights_RO[0]]
    layers = [*layer_indices, 0, 0]
    expand_kernel[(slots * num_width_tiles,)](
        out_TO, s_PTQ, w[0], w[1], w[2], *first.kernel_arguments, *ranks_of_others(segments),
        first.count, num_tokens, num_width_tiles, layers[0], layers[1], layers[2],
        width, out_TO.stride(0), w[0].stride(0), s_PTQ.stride(1),
        PROJECTIONS=count, SCALED=scaled, DROPOUT=dropout and first.has_dropout,
        BLOCK_TOKENS=tiles.block_tokens, BLOCK_RANK=block, BLOCK_WIDTH=block_width,
        SEGMENTS=padded_segments(first), EVEN=width % (block_width * width_tiles) == 0,
        PRECISION="ieee" if out_TO.dtype == torch.float32 else "tf32",
        WIDTH_TILES=width_tiles, STAGES=tiles.num_stages, OWN_RANKS=differ(segments),
        RANK_LOOP=first.rank_limit > block, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
