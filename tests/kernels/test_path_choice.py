"""Which implementation runs where, and the reason that is given for it."""

from __future__ import annotations

import re

import pytest
import torch

from kernels.path_choice import Implementation, choose_path, decide, kernel_path

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("device", "dtype", "has_triton", "capability", "is_rocm", "expected", "reason"),
    [
        ("cpu", BF16, True, (0, 0), False, Implementation.TWIN, ""),
        ("mps", BF16, False, (0, 0), False, Implementation.TWIN, ""),
        ("cuda", BF16, True, (9, 0), False, Implementation.TRITON, ""),
        ("cuda", torch.float16, True, (8, 0), False, Implementation.TRITON, ""),
        ("cuda", BF16, False, (9, 0), False, Implementation.TORCH_GROUPED, "Triton is not installed"),
        ("cuda", BF16, True, (7, 5), False, Implementation.TORCH_GROUPED, "need compute capability 8.0.*has 7.5"),
        ("cuda", BF16, True, (9, 4), True, Implementation.TORCH_GROUPED, "ROCm"),
        ("cuda", torch.float64, True, (9, 0), False, Implementation.TORCH_GROUPED, "do not serve torch.float64"),
    ],
)
def test_choice(
    device: str,
    dtype: torch.dtype,
    has_triton: bool,
    capability: tuple[int, int],
    is_rocm: bool,
    expected: Implementation,
    reason: str,
) -> None:
    choice = decide(device, dtype, has_triton=has_triton, capability=capability, is_rocm=is_rocm)
    assert choice.implementation is expected
    assert re.search(reason, choice.why_not_triton) if reason else choice.why_not_triton == ""


def test_path_is_named() -> None:
    assert kernel_path(torch.device("cpu")) == "torch twin on cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_path_is_named_on_the_gpu() -> None:
    choice, named = choose_path(torch.device("cuda")), kernel_path(torch.device("cuda"))
    assert choice.implementation is not Implementation.TWIN
    assert named.startswith(f"{choice.implementation} on cuda")
    assert choice.why_not_triton in named
