"""One query per row over a pool of pages, in Triton; see `paged_attention`.

One program serves a row and a key head with all queries that share it, and goes through the places that the row looks
at, and no others, with a running maximum and sum. Its few queries are filled up to the 16 that the tensor cores take:
reading keys and values is what takes the time.

Shape suffixes: see `paged_attention`.
"""

from __future__ import annotations

# mypy: disallow-untyped-defs=False
# Triton infers the types of what it compiles.
import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from kernels.pages import PAGE_PLACES
from kernels.triton_tuning import Tiles

TILES = Tiles(block_tokens=64, block_width=0, num_warps=4, num_stages=3)
"""Not in the table of `triton_tuning`: `benchmarks/bench_paged_attention.py` compares some."""
TILE_BYTES = 16384
"""Of one tile of keys, at most: several tiles of keys and values of several programs fit a multiprocessor."""


@triton.jit(do_not_specialize=["row_pages"])
def paged_attention_kernel(
    out, query, keys, values, pages, counts,
    row_pages, scale, query_row_stride, query_head_stride,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // KEY_HEADS
    head = tl.program_id(0) % KEY_HEADS
    count = tl.load(counts + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(count - WINDOW, 0)
    g = tl.arange(0, GROUP_BLOCK)
    d = tl.arange(0, WIDTH_BLOCK)
    live_gd = (g < GROUP)[:, None] & (d < WIDTH)[None, :]
    query_heads = head * GROUP + g
    query_tile = query + row.to(tl.int64) * query_row_stride + query_heads[:, None] * query_head_stride + d[None, :]
    q = tl.load(query_tile, mask=live_gd, other=0.0)
    row_table = pages + row.to(tl.int64) * row_pages
    largest = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    acc = tl.zeros([GROUP_BLOCK, WIDTH_BLOCK], tl.float32)
    for start in range(first // BLOCK * BLOCK, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        seen = (place >= first) & (place < count)
        page = tl.load(row_table + place // PAGE, mask=seen, other=0).to(tl.int64)
        offset = ((page * PAGE + place % PAGE) * KEY_HEADS + head) * WIDTH
        live_pd = seen[:, None] & (d < WIDTH)[None, :]
        k = tl.load(keys + offset[:, None] + d[None, :], mask=live_pd, other=0.0)
        v = tl.load(values + offset[:, None] + d[None, :], mask=live_pd, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP > 0:
            scores = SOFTCAP * (2 * tl.sigmoid(2 * scores / SOFTCAP) - 1)  # tanh
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(largest - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        largest = higher
    out_rows = row.to(tl.int64) * (KEY_HEADS * GROUP) + query_heads
    tl.store(
        out + out_rows[:, None] * WIDTH + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=live_gd
    )


def attend(
    query_NHD: Tensor,
    keys_FKD: Tensor,
    values_FKD: Tensor,
    pages_NM: Tensor,
    counts_N: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """`paged_attention` on the kernel; heads of 16 elements at least.

    Args:
        tiles: other than `TILES`; `block_tokens` places are read at a time, at most as many as `TILE_BYTES` hold.
    """
    num_rows, heads, width = query_NHD.shape
    key_heads = keys_FKD.shape[1]
    assert keys_FKD.is_contiguous() and values_FKD.is_contiguous()
    query_NHD = query_NHD if query_NHD.stride(2) == 1 else query_NHD.contiguous()
    out_NHD = query_NHD.new_empty(query_NHD.shape)
    width_block = triton.next_power_of_2(width)
    tiles = tiles or TILES
    block = max(16, min(tiles.block_tokens, TILE_BYTES // (width_block * keys_FKD.element_size())))
    paged_attention_kernel[(num_rows * key_heads,)](
        out_NHD, query_NHD, keys_FKD, values_FKD, pages_NM, counts_N,
        pages_NM.stride(0), scale, query_NHD.stride(0), query_NHD.stride(1),
        KEY_HEADS=key_heads, GROUP=heads // key_heads, GROUP_BLOCK=max(16, triton.next_power_of_2(heads // key_heads)),
        WIDTH=width, WIDTH_BLOCK=width_block, PAGE=PAGE_PLACES, BLOCK=block,
        WINDOW=window or 0, SOFTCAP=softcap or 0.0, PRECISION="ieee" if query_NHD.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out_NHD
