"""What a first call costs: compile times of every Triton kernel that one layer group needs, from an empty cache.

    python benchmarks/first_call.py --out FOLDER                   # on a GPU: writes FOLDER/first_call.csv
    python benchmarks/first_call.py --out FOLDER --compile-only    # anywhere: compiles for compute capability 9.0

Each case is one `grouped_lora_linears`, forward and backward, of layer shapes of Llama-3.2-1B, with and without dropout
and ranks above 64, in a process of its own. A second call with other segments must compile nothing.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

GROUPS = {"q, k, v": (2048, (2048, 512, 512)), "gate, up": (2048, (8192, 8192)), "down": (8192, (2048,))}
RANKS = {"up to 64": (8, 16, 24, 48, 64, 32, 12), "up to 128": (8, 16, 24, 48, 64, 96, 128)}
COLUMNS = ("case", "ranks", "dropout", "kernel", "variants", "seconds", "slowest_seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--case", choices=list(GROUPS), help=argparse.SUPPRESS)
    parser.add_argument("--ranks", choices=list(RANKS), default="up to 64", help=argparse.SUPPRESS)
    parser.add_argument("--dropout", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        measure(options.out, options.case, options.ranks, options.dropout, compile_only=options.compile_only)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "first_call.csv").open("w", newline="", encoding="utf-8") as target:
        csv.writer(target, lineterminator="\n").writerow(COLUMNS)
    for case, ranks, dropout in itertools.product(GROUPS, RANKS, ("0.0", "0.1")):
        command = [sys.executable, __file__, "--out", str(options.out), "--case", case, "--ranks", ranks]
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "TRITON_CACHE_DIR": cache}
            command += ["--dropout", dropout, *["--compile-only"] * options.compile_only]
            subprocess.run(command, env=environment, check=True)


def compile_without_running() -> None:
    """Let Triton compile for a GPU that is not there, and launch nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import KernelInterface

    class AbsentGpu:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    driver.set_active(AbsentGpu())
    KernelInterface.__getitem__ = lambda self, grid: lambda *a, **k: self.run(*a, grid=grid, warmup=True, **k)


def measure(out: Path, case: str, ranks: str, dropout: float, *, compile_only: bool) -> None:
    import torch
    import triton

    if compile_only:
        compile_without_running()
    compiled: list[tuple[str, float]] = []
    triton.knobs.compilation.listener = lambda *, src, times, cache_hit, **_: compiled.append(
        (src.fn.__name__, times.total / 1e6 * (not cache_hit))
    )
    device = "meta" if compile_only else "cuda"
    call = _make_call(case, RANKS[ranks], dropout, device)
    if not compile_only:
        torch.mm(*torch.ones(2, 16, 16, device=device, dtype=torch.bfloat16))  # cuBLAS starts outside of the figure
        torch.cuda.synchronize()
    start = time.perf_counter()
    call((192,) * 7)
    seconds = sum(value for _, value in compiled) if compile_only else time.perf_counter() - start
    count = len(compiled)
    call((64, 0, 300, 17, 5, 957, 1))  # as many in all: another total may select other tiles
    assert len(compiled) == count, f"other segments compiled {compiled[count:]}"
    rows = []
    for kernel in sorted({name for name, _ in compiled}):
        own = [value for name, value in compiled if name == kernel]
        rows.append((case, ranks, dropout, kernel, len(own), f"{sum(own):.2f}", f"{max(own):.2f}"))
    rows.append(
        (case, ranks, dropout, "whole call", count, f"{seconds:.2f}", f"{max(value for _, value in compiled):.2f}")
    )
    for row in rows:
        print(*row, sep=" | ", flush=True)
    with (out / "first_call.csv").open("a", newline="", encoding="utf-8") as target:
        csv.writer(target, lineterminator="\n").writerows(rows)


def _make_call(case: str, ranks: tuple[int, ...], dropout: float, device: str) -> Any:
    """Forward and backward over the given tokens of each job."""
    import torch

    from kernels.projections import Projection
    from kernels.segments import SegmentSpec, make_segments
    from kernels.triton_lora import backward_projections, forward_projections

    width, widths_out = GROUPS[case]
    starts = list(itertools.accumulate(ranks, initial=0))
    projections = []
    for i, width_out in enumerate(widths_out):
        a, b = (torch.zeros(starts[-1], w, device=device, dtype=torch.bfloat16) for w in (width, width_out))
        sinks = (torch.zeros_like(a, dtype=torch.float32), torch.zeros_like(b, dtype=torch.float32))
        weight = torch.zeros(width_out, width, device=device, dtype=torch.bfloat16)
        projections.append(Projection(weight=weight, bias_O=None, a_RI=a, b_RO=b, layer_index=i, gradient_sinks=sinks))

    def call(tokens: tuple[int, ...]) -> None:
        specs = [
            SegmentSpec(num_tokens=t, rank_start=start, lora_rank=rank, scale=1.0, dropout=dropout, dropout_seed=7)
            for t, start, rank in zip(tokens, starts, ranks, strict=False)
        ]
        segments = [make_segments(specs, device)] * len(projections)
        x = torch.zeros(sum(tokens), width, device=device, dtype=torch.bfloat16)
        outputs, s_PTQ = forward_projections(x, projections, segments, overlap=False)
        options = {"input_needs_gradient": True, "accumulate": False, "overlap": False}
        backward_projections(outputs, x, s_PTQ, projections, segments, **options)
        if device == "cuda":
            torch.cuda.synchronize()

    return call


if __name__ == "__main__":
    main()
