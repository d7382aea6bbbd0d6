"""dA = dS^T drop(x) and dB = scale S^T dy in Triton, grouped over ragged segments.

One program owns BLOCK_RANK x BLOCK_WIDTH of one job's gradient and goes through the job's tokens. Jobs with more than
`chunk` tokens are cut into chunks whose partial sums go to a workspace; a second kernel adds them in a fixed order, so
the result is the same on every run. Only segments of more than one chunk touch the workspace: those begin at slot
2 * (start // chunk), which leaves each room enough, since it spans at least one multiple of `chunk`.

Shape suffixes: see `segments`, `triton_shrink`.
"""

from __future__ import annotations

# mypy: disallow-untyped-defs=False
# Triton infers the types of what it compiles.
import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from kernels.segments import Segments
from kernels.triton_tiles import dropped, load_mask_state, locate_tile
from kernels.triton_tuning import NOT_SPECIALIZED, Tiles, choose_tiles, padded_segments, rank_block


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def outer_kernel(
    grad, partial, x, s,
    token_offsets, rank_offsets, ranks, scales, dropouts, thresholds, seeds,
    num_segments, num_width_tiles, num_rank_tiles, layer0, chunk,
    width, x_stride, grad_stride, s_stride,
    SCALED: tl.constexpr, DROPOUT: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_WIDTH: tl.constexpr, SEGMENTS: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    program = tl.num_programs(0) - 1 - tl.program_id(0) if REVERSE else tl.program_id(0)
    rank_start = (program % num_rank_tiles) * BLOCK_RANK
    width_tile = program // num_rank_tiles % num_width_tiles
    slot = program // (num_rank_tiles * num_width_tiles)
    segment, first, start, end = locate_tile(token_offsets, num_segments, slot, chunk, SEGMENTS)
    # An empty segment's only slot writes the zeros that an overwritten gradient needs.
    if (first >= end) and (ACCUMULATE or start < end or first > start):
        return
    rank = tl.load(ranks + segment)
    if rank_start >= rank:
        return
    t = tl.arange(0, BLOCK_TOKENS)
    r = tl.arange(0, BLOCK_RANK)
    feature = width_tile * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    live_r = rank_start + r < rank
    if DROPOUT:
        seed, threshold, keep_scale = load_mask_state(seeds, thresholds, dropouts, segment)
    acc = tl.zeros([BLOCK_RANK, BLOCK_WIDTH], tl.float32)
    last = tl.minimum(first + chunk, end)
    for token_start in range(first, last, BLOCK_TOKENS):
        token = token_start + t
        live_t = token < last
        s_rows = s + token.to(tl.int64)[:, None] * s_stride
        s_tile = tl.load(s_rows + (rank_start + r)[None, :], mask=live_t[:, None] & live_r[None, :], other=0.0)
        x_mask = live_t[:, None] if EVEN else live_t[:, None] & (feature < width)[None, :]
        x_tile = tl.load(x + token.to(tl.int64)[:, None] * x_stride + feature[None, :], mask=x_mask, other=0.0)
        if DROPOUT:
            x_tile = dropped(x_tile, seed, layer0, token - start, feature, threshold, keep_scale)
        acc = tl.dot(tl.trans(s_tile), x_tile, acc, input_precision=PRECISION)
    if SCALED:
        acc *= tl.load(scales + segment)
    mask = live_r[:, None] & (feature < width)[None, :]
    if end - start > chunk:
        part = 2 * (start // chunk) + (first - start) // chunk
        partial_row = part.to(tl.int64) * num_rank_tiles * BLOCK_RANK + rank_start + r
        tl.store(partial + partial_row[:, None] * width + feature[None, :], acc, mask=mask)
    else:
        row = tl.load(rank_offsets + segment).to(tl.int64) + rank_start + r
        grad_tile = grad + row[:, None] * grad_stride + feature[None, :]
        if ACCUMULATE:
            acc += tl.load(grad_tile, mask=mask, other=0.0)
        tl.store(grad_tile, acc, mask=mask)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def add_chunks_kernel(
    grad, partial, token_offsets, rank_offsets, ranks,
    num_width_tiles, rank_rows, chunk, width, grad_stride,
    ACCUMULATE: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0) // num_width_tiles
    start = tl.load(token_offsets + segment)
    end = tl.load(token_offsets + segment + 1)
    rank = tl.load(ranks + segment)
    r = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    if (end - start <= chunk) or (tl.program_id(1) * BLOCK_RANK >= rank):
        return
    feature = (tl.program_id(0) % num_width_tiles) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    mask = (r < rank)[:, None] & (feature < width)[None, :]
    row = tl.load(rank_offsets + segment).to(tl.int64) + r
    grad_tile = grad + row[:, None] * grad_stride + feature[None, :]
    total = tl.zeros([BLOCK_RANK, BLOCK_WIDTH], tl.float32)
    if ACCUMULATE:
        total = tl.load(grad_tile, mask=mask, other=0.0)
    first_part = (2 * (start // chunk)).to(tl.int64)
    for part in range(0, (end - start + chunk - 1) // chunk):
        partial_row = (first_part + part) * rank_rows + r
        total += tl.load(partial + partial_row[:, None] * width + feature[None, :], mask=mask, other=0.0)
    tl.store(grad_tile, total, mask=mask)


def outer_(
    grad_RI: Tensor,
    x_TI: Tensor,
    s_TQ: Tensor,
    segments: Segments,
    layer_index: int,
    *,
    scaled: bool = False,
    dropout: bool = False,
    accumulate: bool = True,
    reverse: bool = True,
    tiles: Tiles | None = None,
) -> None:
    """Add S^T x of each segment to its rank rows of `grad_RI`, float32, in place.

    Args:
        grad_RI: columns contiguous, any row stride. Rank rows of no segment are never touched.
        x_TI: rows contiguous.
        s_TQ: one projection's plane from `shrink`.
        segments: of the T tokens.
        layer_index: enters the dropout mask.
        scaled: multiply by the segment's scale.
        dropout: apply the layer's dropout mask to x.
        accumulate: False writes instead of adding; segments without tokens then get exact zeros.
        reverse: begin with the last tokens, which the kernel before may have left in the L2.
        tiles: other than the table's.
    """
    num_tokens, width = x_TI.shape
    tiles = tiles or choose_tiles("outer", num_tokens, width)
    block, block_width = rank_block(segments), min(tiles.block_width, max(16, triton.next_power_of_2(width)))
    num_width_tiles, num_rank_tiles = triton.cdiv(width, block_width), triton.cdiv(segments.rank_limit, block)
    chunk = chunk_tokens(num_tokens, num_width_tiles, tiles.block_tokens)
    is_cut = num_tokens > chunk
    rank_rows = num_rank_tiles * block
    partial = grad_RI.new_empty((2 * (num_tokens // chunk) + 2) * rank_rows * width) if is_cut else grad_RI
    slots = num_tokens // chunk + segments.count
    outer_kernel[(slots * num_width_tiles * num_rank_tiles,)](
        grad_RI, partial, x_TI, s_TQ, *segments.kernel_arguments,
        segments.count, num_width_tiles, num_rank_tiles, layer_index, chunk,
        width, x_TI.stride(0), grad_RI.stride(0), s_TQ.stride(0),
        SCALED=scaled, DROPOUT=dropout and segments.has_dropout, ACCUMULATE=accumulate,
        BLOCK_TOKENS=tiles.block_tokens, BLOCK_RANK=block, BLOCK_WIDTH=block_width, SEGMENTS=padded_segments(segments),
        EVEN=width % block_width == 0, PRECISION="ieee" if x_TI.dtype == torch.float32 else "tf32",
        REVERSE=reverse, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if is_cut:
        add_chunks_kernel[(segments.count * triton.cdiv(width, 128), triton.cdiv(segments.rank_limit, 16))](
            grad_RI, partial, segments.token_offsets_S1, segments.rank_offsets_S, segments.ranks_S,
            triton.cdiv(width, 128), rank_rows, chunk, width, grad_RI.stride(0),
            ACCUMULATE=accumulate, BLOCK_RANK=16, BLOCK_WIDTH=128, num_warps=4,
        )  # fmt: skip


def chunk_tokens(num_tokens: int, num_width_tiles: int, block_tokens: int) -> int:
    """Most tokens that one program goes through: so few that some hundred programs share the work, 1024 at least."""
    wanted_chunks = min(16, max(1, 512 // num_width_tiles))
    return max(1024, triton.cdiv(triton.cdiv(num_tokens, wanted_chunks), block_tokens) * block_tokens)
