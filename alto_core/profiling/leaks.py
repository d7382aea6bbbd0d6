"""Memory that an engine leaves behind: a task that leaks takes it from every task after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

TOLERATED_BYTES = 16 * 2**20
"""Left by libraries on first use: workspaces, compiled code's constants."""


@contextmanager
def leaked_memory(device: torch.device) -> Iterator[list[int]]:
    """Yields a list whose one entry, after the block, is what tensors hold more than before it; 0: nothing to tell."""
    leaked = [0]
    gc.collect()  # garbage of before must hide nothing
    before = held_bytes(device)
    yield leaked
    gc.collect()
    more = held_bytes(device) - before
    leaked[0] = more if more > TOLERATED_BYTES else 0


def held_bytes(device: torch.device) -> int:
    """Memory of living tensors on a device."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu" and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
