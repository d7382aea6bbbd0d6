"""What the Triton kernels share: from program to segment tile, the dropout mask.

A token tile never spans two segments. Tile slots are laid out without a prefix sum: segment s begins at slot
`start_s // TILE + s`, which leaves room for every segment's tiles whatever the lengths are, so `T // TILE + S` programs
reach everything and the offsets are read on the device alone. Slots without tokens end at once.

Shape suffixes: see `segments`.
"""

from __future__ import annotations

# mypy: disallow-untyped-defs=False
# Triton infers the types of what it compiles.
from collections.abc import Sequence

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from kernels.segments import Segments


@triton.jit
def locate_tile(token_offsets, num_segments, slot, tile_tokens, SEGMENTS: tl.constexpr):
    """Segment of a tile slot, the tile's first token, and the segment's start and end. first >= end: nothing there."""
    index = tl.arange(0, SEGMENTS)
    starts = tl.load(token_offsets + index, mask=index < num_segments, other=0)
    is_before = (starts // tile_tokens + index <= slot) & (index < num_segments)
    segment = tl.sum(is_before.to(tl.int32), 0) - 1
    start = tl.load(token_offsets + segment)
    end = tl.load(token_offsets + segment + 1)
    first = start + (slot - start // tile_tokens - segment) * tile_tokens
    return segment, first, start, end


@triton.jit
def load_ranks(ranks, ranks1, ranks2, segment, PROJECTIONS: tl.constexpr, OWN_RANKS: tl.constexpr):
    """A segment's largest rank and those of each projection."""
    rank = tl.load(ranks + segment)
    rank0 = rank
    rank1 = rank
    rank2 = rank
    if OWN_RANKS:
        if PROJECTIONS > 1:
            rank1 = tl.load(ranks1 + segment)
        if PROJECTIONS > 2:
            rank2 = tl.load(ranks2 + segment)
        rank = tl.maximum(rank0, tl.maximum(rank1, rank2))
    return rank, rank0, rank1, rank2


@triton.jit
def mix32(value):
    """`random_mask.mix32` of uint32 values."""
    value = value ^ (value >> 16)
    value = value * 0x7FEB352D
    value = value ^ (value >> 15)
    value = value * 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def dropped(values, seed, layer_index, token_in_segment, feature, threshold, keep_scale):
    """Zero what `random_mask.keep_mask` drops in a float32 or x-typed [tokens, features] tile, scale up the rest."""
    golden = tl.full([], 0x9E3779B9, tl.uint32)
    layer_seed = mix32(seed ^ mix32(layer_index.to(tl.uint32) + golden))
    token_key = mix32(layer_seed + token_in_segment.to(tl.uint32))
    feature_key = mix32(feature.to(tl.uint32) * golden)
    keep = mix32(token_key[:, None] ^ feature_key[None, :]) >= threshold
    return tl.where(keep, values.to(tl.float32) * keep_scale, 0.0).to(values.dtype)


@triton.jit
def load_mask_state(seeds, thresholds, dropouts, segment):
    """What `dropped` needs to know of a segment."""
    seed = tl.load(seeds + segment).to(tl.uint32, bitcast=True)
    threshold = tl.load(thresholds + segment).to(tl.uint32, bitcast=True)
    return seed, threshold, 1.0 / (1.0 - tl.load(dropouts + segment))


def differ(segments: Sequence[Segments]) -> bool:
    """Whether projections have adapters of their own, which kernels then look up one by one."""
    return any(own is not segments[0] for own in segments)


def ranks_of_others(segments: Sequence[Segments]) -> tuple[Tensor, Tensor]:
    """Ranks of the second and third projection, or what stands in for them."""
    second, third = [*segments[1:], segments[0], segments[0]][:2]
    return second.ranks_S, third.ranks_S
