"""Tile shapes of the Triton kernels: a committed table for common shapes, and what to take where it has no entry.

Nothing is timed at run time: a first call costs the compilation of one variant. The table, triton_tuning.json, is what
`benchmarks/bench_lora_linear.py --tune` found on a GPU.
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


FEWEST_PADDED = 64
"""Segments that a program looks through at once: a warp or two do that as fast for these as for one."""


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
    width_tiles: int = 1
    """Neighbouring tiles of one program; `expand` only."""


DEFAULT = {
    "shrink": Tiles(block_tokens=64, block_width=64, num_stages=4),
    "expand": Tiles(block_tokens=64, block_width=128, num_stages=2, width_tiles=4),
    "outer": Tiles(block_tokens=64, block_width=128, num_stages=3),
}


@functools.lru_cache(maxsize=4096)
def choose_tiles(kernel: str, num_tokens: int, width: int, projections: int = 1) -> Tiles:
    """The table's entry nearest in tokens and width (in powers of two), or the default without a table.

    Entries for that many projections are preferred to those for one.
    """
    rows = _table().get(kernel, ())
    entries = [row[1:] for row in rows if row[0] == projections] or [row[1:] for row in rows if row[0] == 1]
    if not entries:
        return DEFAULT[kernel]

    def distance(entry: tuple[int, int, Tiles]) -> float:
        tokens, entry_width, _ = entry
        return abs(math.log2(max(1, num_tokens) / tokens)) + abs(math.log2(width / entry_width))

    return min(entries, key=distance)[2]


def rank_block(segments: Segments) -> int:
    """Ranks per tile: the hardware multiplies 16 at least, and above 64 a second tile is cheaper than idle ranks."""
    return 16 if segments.rank_limit <= 16 else 32 if segments.rank_limit <= 32 else 64


def fit_width(block_width: int, bytes_per_column: int, num_stages: int, budget: int) -> int:
    """Halve a tile's width until its stages fit into a budget of shared memory, in bytes."""
    while block_width > 16 and block_width * bytes_per_column * num_stages > budget:
        block_width //= 2
    return block_width


def padded_segments(segments: Segments) -> int:
    """Power of two that holds all segments, in few steps: engines with more and fewer slots share their kernels."""
    return max(FEWEST_PADDED, 1 << (segments.count - 1).bit_length())


@functools.lru_cache(maxsize=1)
def _table() -> dict[str, tuple[tuple[int, int, int, Tiles], ...]]:
    """For each kernel: projections, tokens, width, tiles."""
    if not TABLE.exists():
        return {}
    raw = json.loads(TABLE.read_text(encoding="utf-8"))
    return {
        kernel: tuple((row.get("projections", 1), row["tokens"], row["width"], Tiles(**row["tiles"])) for row in rows)
        for kernel, rows in raw.items()
    }
