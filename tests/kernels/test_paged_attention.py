"""Attention over pages: the twin against the formula in float64, and the Triton kernel against the twin."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.paged_attention import paged_attention, paged_attention_twin
from kernels.pages import PAGE_PLACES

ON_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if ON_GPU else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
KERNEL_DTYPES = (torch.float16,) if INTERPRETED else tuple(TOLERANCE)
"""The interpreter does not multiply bfloat16, and is slow."""
COUNTS = (1, 2, 32, 33, 65, 100)
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"window": 7}, {"softcap": 3.0}, {"window": 40, "softcap": 1.5})
SHAPES = ((9, 3, 64), (4, 4, 16), (6, 1, 80), (32, 1, 32))
"""Heads, key heads, width: some of them no powers of two, or more queries a key head than one tile takes."""


def problem(heads: int, key_heads: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Rows whose pages lie across the pool in disorder. All that no row looks at is not a number."""
    draw = torch.Generator().manual_seed(heads)
    num_rows, row_pages = len(COUNTS), -(-max(COUNTS) // PAGE_PLACES) + 1
    pages = torch.randperm(num_rows * row_pages + 5, generator=draw)[: num_rows * row_pages]
    pages_NM = pages.reshape(num_rows, row_pages).int()
    pool = torch.full((2, (num_rows * row_pages + 5) * PAGE_PLACES, key_heads, width), float("nan"))
    for row, count in enumerate(COUNTS):
        for place in range(count):
            at = int(pages_NM[row, place // PAGE_PLACES]) * PAGE_PLACES + place % PAGE_PLACES
            pool[:, at] = torch.randn(2, key_heads, width, generator=draw)
    query_HND = torch.randn(heads, num_rows, width, generator=draw).to(DEVICE, dtype)
    keys, values = pool.to(DEVICE, dtype)
    return {
        "query_NHD": query_HND.transpose(0, 1),
        "keys_FKD": keys,
        "values_FKD": values,
        "pages_NM": pages_NM.to(DEVICE),
        "counts_N": torch.tensor(COUNTS, dtype=torch.int32, device=DEVICE),
        "scale": width**-0.5,
    }


def expected(inputs: dict[str, Any], window: int | None = None, softcap: float | None = None) -> Tensor:
    """Row by row and head by head, in float64."""
    query, out = inputs["query_NHD"].double(), []
    group = query.shape[1] // inputs["keys_FKD"].shape[1]
    for row, count in enumerate(COUNTS):
        places = torch.arange(max(0, count - (window or count)), count, device=DEVICE)
        at = inputs["pages_NM"][row].long()[places // PAGE_PLACES] * PAGE_PLACES + places % PAGE_PLACES
        for head in range(query.shape[1]):
            keys, values = (inputs[name][at, head // group].double() for name in ("keys_FKD", "values_FKD"))
            scores = keys @ query[row, head] * inputs["scale"]
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out.append(scores.softmax(0) @ values)
    return torch.stack(out).reshape(query.shape)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_twin_equals_the_formula_and_reads_nothing_else(shape: tuple[int, int, int], options: dict[str, Any]) -> None:
    inputs = problem(*shape, torch.float32)
    out = paged_attention_twin(**inputs, most_places=max(COUNTS), **options)
    assert torch.allclose(out.double(), expected(inputs, **options), atol=TOLERANCE[torch.float32])
    wider = paged_attention(**inputs, most_places=max(COUNTS) + PAGE_PLACES, **options)
    assert torch.allclose(wider, out, atol=TOLERANCE[torch.float32])


@pytest.mark.gpu
@pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason="runs in the interpreter's process, or on a GPU")
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_the_formula(shape: tuple[int, int, int], options: dict[str, Any], dtype: torch.dtype) -> None:
    from kernels.triton_paged_attention import attend

    inputs = problem(*shape, dtype)
    assert (attend(**inputs, **options).double() - expected(inputs, **options)).abs().max() < TOLERANCE[dtype]


@pytest.mark.skipif(
    INTERPRETED or ON_GPU or importlib.util.find_spec("triton") is None, reason="runs directly here, or not at all"
)
def test_kernel_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", "-p", "no:cacheprovider", "-m", "gpu", __file__]
    folder = Path(__file__).resolve().parents[2]
    result = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert " passed" in result.stdout
