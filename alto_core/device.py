"""Where a task computes, how much memory is free there, and whether an error says that there was too little."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil
import torch

from alto_core.errors import TaskFileError

CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where Linux tells a container's memory, in the second and the first version of its control groups."""


def pick_device(wanted: str | None) -> str:
    """The device that was asked for, or the first GPU, or the CPU.

    Raises:
        TaskFileError: there is no such device; named after the setting, `ALTO_DEVICE`.
    """
    if wanted is None:
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise TaskFileError("ALTO_DEVICE", got=wanted, expected="cpu, cuda or cuda:N") from None
    if device.type == "cpu":
        return "cpu"
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if (device.index or 0) >= count:
        raise TaskFileError("ALTO_DEVICE", got=wanted, expected=f"cpu, or one of {count} CUDA devices")
    return f"{device.type}:{device.index or 0}"


def pick_devices(wanted: str | None, at_most: int | None) -> tuple[str, ...]:
    """The devices of a task's ranks: the GPUs that this process sees, or that many processes on the CPU.

    Args:
        wanted: as in `pick_device`; a GPU's index means that GPU alone.
        at_most: so many; None: all GPUs.

    Raises:
        TaskFileError: as `pick_device` does.
    """
    device = pick_device(wanted)
    if device == "cpu":
        return ("cpu",) * (at_most or 1)
    if wanted is not None and torch.device(wanted).index is not None:
        return (device,)
    return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))[:at_most]


def free_bytes(device: torch.device) -> int:
    """Memory that can be allocated now: of the GPU, what the allocator holds unused included, or of the machine."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return int(psutil.virtual_memory().available)


def host_bytes() -> int:
    """Memory of the machine, or what the container that this process runs in may use of it."""
    limits = [psutil.virtual_memory().total]
    for file in CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # no such file; the word "max"
            limits.append(int(Path(file).read_text(encoding="ascii")))
    return min(limits)


def gpus_of_this_machine() -> tuple[tuple[int, ...], int]:
    """Indices of the GPUs, and the memory that each of them has at least, in bytes."""
    indices = tuple(range(torch.cuda.device_count()))
    return indices, min((torch.cuda.get_device_properties(i).total_memory for i in indices), default=0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is, or followed from, an allocation that failed on the GPU or on the host."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
