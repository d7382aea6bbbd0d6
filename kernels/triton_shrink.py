"""S = drop(x) A^T in Triton, for up to three projections that read the same x; also dS = scale dy B^T.

One program makes BLOCK_TOKENS x BLOCK_RANK of S for every projection, so x is read once. Rank tiles beyond a job's rank
end at once. When there are too few tiles to fill the GPU, the reduction is split: partial sums go to a float32
workspace, and a second kernel adds them in a fixed order. (Left to the readers of S, that sum cost more than it saved.)

Shape suffixes: see `segments`; P projections, Q rank limit rounded up.
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
def shrink_kernel(
    x, w0, w1, w2, s,
    token_offsets, rank_offsets, ranks, scales, dropouts, thresholds, seeds, ranks1, ranks2,
    num_segments, num_tokens, num_rank_tiles, layer0, layer1, layer2,
    width, split_width, x_stride, w_stride, s_stride,
    PROJECTIONS: tl.constexpr, SCALED: tl.constexpr, DROPOUT: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_WIDTH: tl.constexpr, SEGMENTS: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, REVERSE: tl.constexpr, OWN_RANKS: tl.constexpr,
):  # fmt: skip
    program = tl.num_programs(0) - 1 - tl.program_id(0) if REVERSE else tl.program_id(0)
    slot = program // num_rank_tiles
    rank_start = (program % num_rank_tiles) * BLOCK_RANK
    split = tl.program_id(1)
    segment, first, start, end = locate_tile(token_offsets, num_segments, slot, BLOCK_TOKENS, SEGMENTS)
    if first >= end:
        return
    rank, rank0, rank1, rank2 = load_ranks(ranks, ranks1, ranks2, segment, PROJECTIONS, OWN_RANKS)
    if rank_start >= rank:
        return
    t = tl.arange(0, BLOCK_TOKENS)
    r = tl.arange(0, BLOCK_RANK)
    k = tl.arange(0, BLOCK_WIDTH)
    live_t = first + t < end
    live_r = rank_start + r < rank
    x_rows = x + first.to(tl.int64) * x_stride + t[:, None] * x_stride
    w_rows = (tl.load(rank_offsets + segment) + rank_start + r).to(tl.int64)[None, :] * w_stride
    if DROPOUT:
        seed, threshold, keep_scale = load_mask_state(seeds, thresholds, dropouts, segment)
    acc0 = tl.zeros([BLOCK_TOKENS, BLOCK_RANK], tl.float32)
    acc1 = tl.zeros([BLOCK_TOKENS, BLOCK_RANK], tl.float32)
    acc2 = tl.zeros([BLOCK_TOKENS, BLOCK_RANK], tl.float32)
    k_end = tl.minimum((split + 1) * split_width, width)
    for k_start in range(split * split_width, k_end, BLOCK_WIDTH):
        feature = k_start + k
        if EVEN:
            x_mask, w_mask = live_t[:, None], live_r[None, :]
        else:
            x_mask, w_mask = (
                live_t[:, None] & (feature < k_end)[None, :],
                live_r[None, :] & (feature < k_end)[:, None],
            )
        x_tile = tl.load(x_rows + feature[None, :], mask=x_mask, other=0.0)
        own_mask = w_mask & (rank_start + r < rank0)[None, :] if OWN_RANKS else w_mask
        w_tile = tl.load(w0 + w_rows + feature[:, None], mask=own_mask, other=0.0).to(x_tile.dtype)
        x_kept = x_tile
        if DROPOUT:
            x_kept = dropped(x_tile, seed, layer0, first - start + t, feature, threshold, keep_scale)
        acc0 = tl.dot(x_kept, w_tile, acc0, input_precision=PRECISION)
        if PROJECTIONS > 1:
            own_mask = w_mask & (rank_start + r < rank1)[None, :] if OWN_RANKS else w_mask
            w_tile = tl.load(w1 + w_rows + feature[:, None], mask=own_mask, other=0.0).to(x_tile.dtype)
            if DROPOUT:
                x_kept = dropped(x_tile, seed, layer1, first - start + t, feature, threshold, keep_scale)
            acc1 = tl.dot(x_kept, w_tile, acc1, input_precision=PRECISION)
        if PROJECTIONS > 2:
            own_mask = w_mask & (rank_start + r < rank2)[None, :] if OWN_RANKS else w_mask
            w_tile = tl.load(w2 + w_rows + feature[:, None], mask=own_mask, other=0.0).to(x_tile.dtype)
            if DROPOUT:
                x_kept = dropped(x_tile, seed, layer2, first - start + t, feature, threshold, keep_scale)
            acc2 = tl.dot(x_kept, w_tile, acc2, input_precision=PRECISION)
    if SCALED:
        acc0 *= tl.load(scales + segment)
    plane = num_tokens.to(tl.int64) * s_stride
    s_tile = s + split * plane + first.to(tl.int64) * s_stride + t[:, None] * s_stride + (rank_start + r)[None, :]
    s_mask = live_t[:, None] & live_r[None, :]
    tl.store(s_tile, acc0.to(s.dtype.element_ty), mask=s_mask)
    if PROJECTIONS > 1:
        tl.store(s_tile + SPLITS * plane, acc1.to(s.dtype.element_ty), mask=s_mask)
    if PROJECTIONS > 2:
        tl.store(s_tile + 2 * SPLITS * plane, acc2.to(s.dtype.element_ty), mask=s_mask)


@triton.jit(do_not_specialize=["size"])
def add_splits_kernel(s, partial, size, splits, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    first = partial + tl.program_id(1).to(tl.int64) * splits * size + place
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(0, splits):
        total += tl.load(first + split * size.to(tl.int64), mask=mask, other=0.0)
    tl.store(s + tl.program_id(1).to(tl.int64) * size + place, total.to(s.dtype.element_ty), mask=mask)


def shrink(
    x_TI: Tensor,
    weights_RI: Sequence[Tensor],
    segments: Sequence[Segments],
    layer_indices: Sequence[int],
    *,
    scaled: bool = False,
    dropout: bool = True,
    reverse: bool = False,
    tiles: Tiles | None = None,
    into_PTQ: Tensor | None = None,
) -> Tensor:
    """S [P, T, Q] of up to three projections, in the dtype of x; only the columns below a job's rank are written.

    They are 0 in a projection where the job has no adapter, if it has one in another.

    Args:
        x_TI: rows contiguous; bfloat16, float16 or float32.
        weights_RI: A of each projection, of one row stride; any float dtype.
        segments: of the T tokens, one per projection; they `differ_in_ranks_only`.
        layer_indices: one per projection.
        scaled: multiply by the segment's scale (one projection).
        dropout: False ignores the segments' dropout.
        reverse: begin with the last tokens, which the kernel before may have left in the L2.
        tiles: other than the table's.
        into_PTQ: where S goes; None: a new tensor.
    """
    count, (num_tokens, width), first = len(weights_RI), x_TI.shape, segments[0]
    assert 1 <= count <= 3, "three projections at most share an input"
    assert not (scaled and count > 1), "only dS is scaled, and that comes from one dy"
    assert all(w.stride() == weights_RI[0].stride() for w in weights_RI), "one row stride"
    tiles = tiles or choose_tiles("shrink", num_tokens, width, count)
    block = rank_block(first)
    column = tiles.block_tokens * x_TI.element_size() + count * block * weights_RI[0].element_size()
    block_width = fit_width(tiles.block_width, column, tiles.num_stages, 140_000)
    block_width = min(block_width, max(16, triton.next_power_of_2(width)))
    num_rank_tiles = triton.cdiv(first.rank_limit, block)
    splits = min(tiles.splits, triton.cdiv(width, block_width))
    s = new_shrunk(x_TI, count, first) if into_PTQ is None else into_PTQ
    target = s if splits == 1 else s.new_empty((count, splits, *s.shape[1:]), dtype=torch.float32)
    split_width = triton.cdiv(triton.cdiv(width, splits), block_width) * block_width
    slots = num_tokens // tiles.block_tokens + first.count
    w = [*weights_RI, weights_RI[0], weights_RI[0]]
    layers = [*layer_indices, 0, 0]
    shrink_kernel[(slots * num_rank_tiles, splits)](
        x_TI, w[0], w[1], w[2], target, *first.kernel_arguments, *ranks_of_others(segments),
        first.count, num_tokens, num_rank_tiles, layers[0], layers[1], layers[2],
        width, split_width, x_TI.stride(0), w[0].stride(0), s.stride(1),
        PROJECTIONS=count, SCALED=scaled, DROPOUT=dropout and first.has_dropout, SPLITS=splits,
        BLOCK_TOKENS=tiles.block_tokens, BLOCK_RANK=block, BLOCK_WIDTH=block_width, SEGMENTS=padded_segments(first),
        EVEN=width % block_width == 0, PRECISION="ieee" if x_TI.dtype == torch.float32 else "tf32",
        REVERSE=reverse, OWN_RANKS=differ(segments), num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if splits > 1:
        size = s[0].numel()
        add_splits_kernel[(triton.cdiv(size, 1024), count)](s, target, size, splits, BLOCK=1024, num_warps=4)
    return s


def new_shrunk(like: Tensor, count: int, segments: Segments) -> Tensor:
    """Room for S [P, T, Q] of as many tokens as `like` has, in its dtype."""
    return like.new_empty((count, like.shape[0], segments.shrunk_width))
