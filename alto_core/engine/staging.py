"""Numbers that change from step to step, moved to the device in one copy that nobody waits for.

On CUDA the host writes into one of two pinned buffers. A side stream copies it to the device while the step before
still runs, and the main stream takes it over when it gets there. The host waits only when both buffers are on their
way, so it is never more than two steps ahead.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NUM_BUFFERS = 2
ALIGNMENT = 64
"""Bytes. Triton compiles a kernel anew for a pointer that is not a multiple of 16."""
_BYTES = {torch.int64: 8, torch.int32: 4, torch.float32: 4}


class StagedFields:
    """Named one-dimensional arrays of fixed length in one buffer.

    Args:
        fields: length and dtype of each.
        device: where the arrays are read.
    """

    def __init__(self, fields: Mapping[str, tuple[int, torch.dtype]], device: torch.device):
        self._fields, self._device = dict(fields), device
        num_bytes = sum(_aligned(length * _BYTES[dtype]) for length, dtype in self._fields.values())
        self._bytes = torch.zeros(max(ALIGNMENT, num_bytes), dtype=torch.uint8, device=device)
        self.on_device = self._views(self._bytes)
        """The arrays as tensors; kernels and captured graphs may hold them."""
        self._ring = _Ring(num_bytes, device) if device.type == "cuda" else None

    def begin(self) -> dict[str, NDArray[np.generic]]:
        """Arrays on the host to fill in. All of them hold whatever they held before."""
        target = self._bytes if self._ring is None else self._ring.next_host()
        return {name: tensor.numpy() for name, tensor in self._views(target).items()}

    def send(self) -> None:
        """Make what was filled in the content of `on_device`, for kernels that are enqueued from now on."""
        if self._ring is not None:
            self._ring.send(self._bytes)

    def _views(self, buffer: Tensor) -> dict[str, Tensor]:
        views, start = {}, 0
        for name, (length, dtype) in self._fields.items():
            num_bytes = length * _BYTES[dtype]
            views[name] = buffer[start : start + num_bytes].view(dtype)
            start += _aligned(num_bytes)
        return views


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class _Ring:
    """Two pinned buffers, each with a copy on the device that the main stream reads."""

    def __init__(self, num_bytes: int, device: torch.device):
        size = max(ALIGNMENT, num_bytes)
        self._device, self._turn = device, 0
        self._side = torch.cuda.Stream(device)
        self._pinned = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(NUM_BUFFERS)]
        self._arrived = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in range(NUM_BUFFERS)]
        self._taken = [torch.cuda.Event() for _ in range(NUM_BUFFERS)]
        for event in self._taken:
            # The side stream must not write before the main one is done with whatever held this memory before.
            event.record(torch.cuda.current_stream(device))

    def next_host(self) -> Tensor:
        self._turn = (self._turn + 1) % NUM_BUFFERS
        self._copied[self._turn].synchronize()
        return self._pinned[self._turn]

    def send(self, target: Tensor) -> None:
        turn, main = self._turn, torch.cuda.current_stream(self._device)
        self._side.wait_event(self._taken[turn])
        with torch.cuda.stream(self._side):
            self._arrived[turn].copy_(self._pinned[turn], non_blocking=True)
            self._copied[turn].record(self._side)
        main.wait_event(self._copied[turn])
        target.copy_(self._arrived[turn])
        self._taken[turn].record(main)
