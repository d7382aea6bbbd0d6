"""Attention of one decode step over pages of keys and values, by shapes of tiles, against torch's own attention.

    python benchmarks/bench_paged_attention.py        # prints; needs a CUDA device and Triton

Shapes of SmolLM2-135M and Llama-3.2-1B, rows of 60 to 300 places, and a few long ones. "Share" is the bytes of all keys
and values that are looked at, over the time and the rate at which the device copies. torch attends over rows that are
padded to the longest, with a mask.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape."""

    name: str
    rows: int
    shortest: int
    longest: int
    heads: int
    key_heads: int
    width: int = 64


CASES = (
    Case(name="SmolLM2-135M", rows=8192, shortest=60, longest=300, heads=9, key_heads=3),
    Case(name="SmolLM2-135M", rows=1319, shortest=60, longest=300, heads=9, key_heads=3),
    Case(name="Llama-3.2-1B", rows=2048, shortest=60, longest=300, heads=32, key_heads=8),
    Case(name="Llama-3.2-1B", rows=16, shortest=3000, longest=4000, heads=32, key_heads=8),
)
BLOCKS, WARPS, STAGES = (32, 64, 128), (2, 4), (2, 3, 4)


def inputs_of(case: Case) -> dict[str, Any]:
    import torch

    from kernels.pages import PAGE_PLACES

    draw = torch.Generator().manual_seed(0)
    counts = torch.randint(case.shortest, case.longest + 1, (case.rows,), generator=draw, dtype=torch.int32)
    row_pages = -(-case.longest // PAGE_PLACES)
    pages = torch.randperm(case.rows * row_pages, generator=draw).reshape(case.rows, row_pages).int()
    shape = (case.rows * row_pages * PAGE_PLACES, case.key_heads, case.width)
    half = {"dtype": torch.bfloat16, "device": "cuda"}
    return {
        "query_NHD": torch.randn(case.rows, case.heads, case.width, **half),
        "keys_FKD": torch.randn(shape, **half),
        "values_FKD": torch.randn(shape, **half),
        "pages_NM": pages.cuda(),
        "counts_N": counts.cuda(),
        "scale": case.width**-0.5,
    }


def milliseconds(run: Callable[[], object], repeats: int = 20) -> float:
    import torch

    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def copy_rate() -> float:
    """Bytes a millisecond, read and written."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source))


def padded(case: Case, inputs: dict[str, Any]) -> Callable[[], object]:
    """torch's attention over the same number of rows, all padded to the longest; heads that share keys are queries."""
    import torch
    from torch.nn import functional

    half = {"dtype": torch.bfloat16, "device": "cuda"}
    length = -(-case.longest // 8) * 8
    keys, values = (torch.randn(case.rows, case.key_heads, length, case.width, **half) for _ in range(2))
    seen = torch.arange(length, device="cuda") < inputs["counts_N"][:, None]
    mask = torch.zeros(case.rows, 1, 1, length, **half).masked_fill(~seen[:, None, None], float("-inf"))
    query = inputs["query_NHD"].reshape(case.rows, case.key_heads, -1, case.width)
    return lambda: functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)


def compare(case: Case, rate: float) -> None:
    """Print the best tiles beside those that are used."""
    from kernels.triton_paged_attention import TILES, attend
    from kernels.triton_tuning import Tiles

    inputs = inputs_of(case)
    num_bytes = 2 * 2 * int(inputs["counts_N"].sum()) * case.key_heads * case.width
    print(f"{case}: torch, padded {milliseconds(padded(case, inputs)):.3f} ms")
    tried = [
        Tiles(block_tokens=block, block_width=0, num_warps=warps, num_stages=stages)
        for block, warps, stages in itertools.product(BLOCKS, WARPS, STAGES)
    ]
    found = sorted((milliseconds(lambda tiles=tiles: attend(**inputs, tiles=tiles)), str(tiles)) for tiles in tried)
    for spent, tiles in [(milliseconds(lambda: attend(**inputs)), f"as it is, {TILES}"), *found[:4]]:
        print(f"  {spent:.3f} ms, share {num_bytes / rate / spent:.2f}: {tiles}", flush=True)


def main() -> None:
    rate = copy_rate()
    print(f"copy {rate / 1e9:.2f} TB/s")
    for case in CASES:
        compare(case, rate)


if __name__ == "__main__":
    main()
