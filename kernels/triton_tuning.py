"""Tile shapes of the Triton kernels: a committed table for common shapes, and what to take where it has no entry.

Nothing is timed at run time: a first call costs the compilation of one variant. `benchmarks/bench_lora_linear.py --tune`
times the candidates on a GPU and writes triton_tuning.json.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path

from kernels.segments import Segments

TABLE = Path(__file__).with_name("triton_tuning.json")

NOT_SPECIALIZED = ["num_segments", "num_tokens", "layer0", "layer1", "layer2", "chunk", "num_width_tiles"]
"""Arguments that change from step to step or from layer to layer: their values must not select another variant."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How one kernel cuts its work."""

    block_tokens: int
    block_width: int
    """Of the reduction in `shrink`, of the output in `expand` and `outer`."""
    num_warps: int = 4
    num_stages: int = 3
    splits: int = 1
    """Of the reduction; `shrink` only."""


DEFAULT = {
    "shrink": Tiles(block_tokens=64, block_width=64, num_stages=4),
    "expand": Tiles(block_tokens=64, block_width=128, num_stages=2),
    "outer": Tiles(block_tokens=64, block_width=128, num_stages=3),
}


@functools.lru_cache(maxsize=4096)
def choose_tiles(kernel: str, num_tokens: int, width: int) -> Tiles:
    """The table's entry nearest in tokens and width (in powers of two), or the default without a table."""
    entries = _table().get(kernel, ())
    if not entries:
        return DEFAULT[kernel]

    def distance(entry: tuple[int, int, Tiles]) -> float:
        tokens, entry_width, _ = entry
        return abs(math.log2(max(1, num_tokens) / tokens)) + abs(math.log2(width / entry_width))

    return min(entries, key=distance)[2]


def rank_block(segments: Segments) -> int:
    """Ranks per tile: the hardware multiplies 16 at least, and above 64 a second tile is cheaper than idle ranks."""
    return 16 if segments.rank_limit <= 16 else 32 if segments.rank_limit <= 32 else 64


def padded_segments(segments: Segments) -> int:
    """Power of two that holds all segments, in few steps so that few variants are compiled."""
    return max(16, 1 << (segments.count - 1).bit_length())


@functools.lru_cache(maxsize=1)
def _table() -> dict[str, tuple[tuple[int, int, Tiles], ...]]:
    if not TABLE.exists():
        return {}
    raw = json.loads(TABLE.read_text(encoding="utf-8"))
    return {
        kernel: tuple((row["tokens"], row["width"], Tiles(**row["tiles"])) for row in rows)
        for kernel, rows in raw.items()
    }
