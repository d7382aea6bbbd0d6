"""CUDA graphs of one device: captured on one stream, in one pool of memory, since they run one after another."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")


class GraphPool:
    """Captures graphs whose memory is shared, and takes it back.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device):
        self._device, self._num_graphs = device, 0
        self._handle = torch.cuda.graph_pool_handle()

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Run here, one by one, what is to be captured next: it compiles and loads whatever is missing."""
        side, main = _capture_stream(self._device), torch.cuda.current_stream(self._device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            yield
        main.wait_stream(side)

    def capture(self, run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """A graph of what `run` enqueues, and what it returned: tensors that each replay writes anew."""
        graph = torch.cuda.CUDAGraph()
        stream = _capture_stream(self._device)
        with torch.cuda.graph(graph, pool=self._handle, stream=stream, capture_error_mode="thread_local"):
            result = run()
        self._num_graphs += 1
        return graph, result

    def forget(self, graph: torch.cuda.CUDAGraph) -> None:
        """Give a graph's memory back to the pool, and the pool's to the allocator with the last graph."""
        graph.reset()
        self._num_graphs -= 1
        if not self._num_graphs:
            # The allocator takes no graph into a pool whose graphs have all gone.
            self._handle = torch.cuda.graph_pool_handle()


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures of a device: libraries keep a workspace of some 32 MiB for every stream that they see."""
    return torch.cuda.Stream(device)
