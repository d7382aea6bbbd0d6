"""Streams beside the current one, for kernels that wait for memory while a frozen product waits for the tensor cores.

A side stream begins by waiting for the current one, and the current one waits for it before anything that both used is
freed. So no tensor's memory is used again too early, also in a captured CUDA graph.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class UnfinishedGradients:
    """Gradients of adapters that are still being computed when their layer's backward pass has returned.

    Nothing reads them before the update, so with few tokens, where the frozen products are too short to hide them, they
    run on beside the layers that follow. Whoever gave this to the layers calls `finish` before reading gradients.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def keep(self, *tensors: Tensor) -> None:
        """Hold what a side stream still reads."""
        self._kept.extend(tensors)

    def finish(self) -> None:
        """Let the current stream wait for all gradients, and hold nothing any more."""
        if self._kept:
            meet(self._kept[0], (GRADIENTS,))
        self._kept.clear()


SHRINKS, GRADIENTS = 0, 1
"""Numbers of the side streams: one for what the layer itself waits for, one for what only the update needs."""


@functools.lru_cache(maxsize=64)
def side_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """The stream of this number beside all others of the device."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def beside(x: Tensor, number: int, overlap: bool = True) -> Iterator[torch.cuda.Stream | None]:
    """Enqueue what follows on a side stream of the tensor's device, after all that the current one holds so far."""
    if not overlap:
        yield None
        return
    side = side_stream(x.device, number)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        yield side


def meet(x: Tensor, numbers: Sequence[int]) -> None:
    """Let the current stream wait for side streams of the tensor's device."""
    for number in numbers:
        torch.cuda.current_stream(x.device).wait_stream(side_stream(x.device, number))
