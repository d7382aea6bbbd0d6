"""Which implementation of the grouped LoRA operation serves a device and dtype, and why not a faster one."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from enum import StrEnum

import torch

TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIN_CAPABILITY = (8, 0)


class Implementation(StrEnum):
    """One module each."""

    TRITON = "Triton kernels"
    TORCH_GROUPED = "torch's grouped products"
    TWIN = "torch twin"


@dataclass(frozen=True, kw_only=True)
class PathChoice:
    """The verdict."""

    implementation: Implementation
    why_not_triton: str = ""
    """Empty with Triton, and on the CPU, where nobody expects it."""


def choose_path(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> PathChoice:
    """What runs for tensors of this device and dtype."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    is_rocm = torch.version.hip is not None
    return decide(device.type, dtype, has_triton=has_triton(), capability=capability, is_rocm=is_rocm)


def decide(
    device_type: str, dtype: torch.dtype, *, has_triton: bool, capability: tuple[int, int], is_rocm: bool
) -> PathChoice:
    """`choose_path` for given facts."""
    if device_type != "cuda":
        return PathChoice(implementation=Implementation.TWIN)
    if is_rocm:
        why_not = "the Triton kernels are for CUDA, this is ROCm"
    elif capability < MIN_CAPABILITY:
        needed, got = (f"{major}.{minor}" for major, minor in (MIN_CAPABILITY, capability))
        why_not = f"the Triton kernels need compute capability {needed}, this device has {got}"
    elif dtype not in TRITON_DTYPES:
        why_not = f"the Triton kernels do not serve {dtype}"
    elif not has_triton:
        why_not = "Triton is not installed"
    else:
        return PathChoice(implementation=Implementation.TRITON)
    # Not the twin: it goes through the adapters one by one.
    return PathChoice(implementation=Implementation.TORCH_GROUPED, why_not_triton=why_not)


def kernel_path(device: torch.device) -> str:
    """Name of the implementation that runs on this device in bfloat16, with the reason where a faster one exists."""
    choice = choose_path(device)
    reason = f" ({choice.why_not_triton})" if choice.why_not_triton else ""
    return f"{choice.implementation} on {device.type}{reason}"


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; it need not be able to run here."""
    return importlib.util.find_spec("triton") is not None
