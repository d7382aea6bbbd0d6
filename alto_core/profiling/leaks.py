"""Memory that an engine leaves behind: a task that leaks takes it from every task after it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

TOLERATED_BYTES = 96 * 2**20
"""Left by libraries on first use: cuBLAS workspaces of two streams (32 MiB each), compiled code's constants."""


@contextmanager
def leaked_memory(held: Callable[[], int | None]) -> Iterator[list[int]]:
    """What is held after the block and was not before it.

    Args:
        held: counts the bytes held at present; None where nobody can.

    Yields:
        A list whose one entry is that number of bytes after the block; 0: nothing to tell.
    """
    leaked = [0]
    if held() is None:  # a look through all objects of a process takes a second, and would tell nothing
        yield leaked
        return
    gc.collect()  # garbage of before must hide nothing
    before = held() or 0
    yield leaked
    gc.collect()
    more = (held() or 0) - before
    leaked[0] = more if more > TOLERATED_BYTES else 0


def allocated_bytes(device: torch.device) -> int | None:
    """Memory of living tensors on a CUDA device; None on others, whose allocators keep no count.

    Counting the tensors among all objects (`gc.get_objects`) would do on the CPU, but not beside threads: a tuple that
    another thread is just building breaks when it is referred to.
    """
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None
