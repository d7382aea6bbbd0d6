"""The kernels compile for a GPU, also where there is none: the interpreter takes what the compiler refuses."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = """
import torch
from benchmarks.first_call import compile_without_running
from kernels.projections import Projection
from kernels.segments import SegmentSpec, make_segments
from kernels.triton_compile_time import kernel_compile_time
from kernels.triton_lora import backward_projections, forward_projections
from kernels.triton_paged_attention import attend

compile_without_running()
torch.set_default_device("meta")  # nothing is read or computed

def compile_layers(ranks, widths_out, dtype, dropout, excluded):
    place = [{"num_tokens": 5, "rank_start": 256 * i, "lora_rank": r} for i, r in enumerate(ranks)]
    specs = [SegmentSpec(**where, scale=1.0, dropout=dropout) for where in place]
    every, rows, width = make_segments(specs, "meta"), 256 * len(ranks), 40
    x = torch.zeros(every.num_tokens, width, dtype=dtype)
    segments = [every.without(excluded) if i else every for i in range(len(widths_out))]
    projections = []
    for i, width_out in enumerate(widths_out):
        a, b = torch.zeros(rows, width, dtype=dtype), torch.zeros(rows, width_out, dtype=dtype)
        projections.append(
            Projection(
                weight=torch.zeros(width_out, width, dtype=dtype), bias_O=None, a_RI=a, b_RO=b, layer_index=i,
                gradient_sinks=(a.float(), b.float()),
            )
        )
    dy, s_PTQ = forward_projections(x, projections, segments, overlap=False)
    options = {"input_needs_gradient": True, "overlap": False, "accumulate": True}
    backward_projections(dy, x, s_PTQ, projections, segments, **options)
    print("compiled", ranks, dtype)

def compile_attention(heads, key_heads, width, dtype, **options):
    pool, rows = torch.zeros(640, key_heads, width, dtype=dtype), torch.zeros(5, 4, dtype=torch.int32)
    attend(torch.zeros(5, heads, width, dtype=dtype), pool, pool, rows, rows[:, 0], scale=0.1, **options)
    print("compiled", heads, dtype)

compile_attention(9, 3, 64, torch.bfloat16)
compile_attention(8, 8, 80, torch.float32, window=40, softcap=30.0)
for is_new in (True, False):
    with kernel_compile_time() as seconds:
        compile_layers((1, 3, 8), (16, 16), torch.bfloat16, 0.1, {1})
    assert (seconds[0] > 0) == is_new, seconds
compile_layers((24, 100), (24,), torch.float16, 0.0, set())
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_compile_without_a_gpu(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("compiled") == 5
