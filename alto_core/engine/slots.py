"""Where all adapters live: one flat set of rank rows for parameters, gradients and both AdamW moments.

    params_RW  [R rank rows, W columns], W = every adapted layer's A row [d_in] and B row [d_out], side by side

A job of rank r owns r neighbouring rank rows, so its whole adapter is one contiguous block: reset, norm, clip, AdamW
and checkpoint of a job are operations on one block, and nothing is padded to a largest rank. Columns of layers that a
job does not adapt stay exactly zero. Each layer's columns start at a multiple of 64 bytes, so that results do not
depend on which rows a job got.

Shape suffixes: R rank rows, W columns, r one job's rank, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alto_core.engine.target_modules import LinearLayer

COLUMN_ALIGNMENT = 16
"""Floats in 64 bytes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotBlock:
    """One job's rank rows, as views of the buffers."""

    rank_start: int
    params_rW: Tensor
    grads_rW: Tensor
    exp_avg_rW: Tensor
    exp_avg_sq_rW: Tensor

    @property
    def lora_rank(self) -> int:
        return int(self.params_rW.shape[0])

    def clear(self) -> None:
        """Zero everything, so that the next job finds no trace of this one."""
        for buffer in (self.params_rW, self.grads_rW, self.exp_avg_rW, self.exp_avg_sq_rW):
            buffer.zero_()


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerAdapters:
    """What one wrapped layer reads and writes."""

    a_RI: Tensor
    """Leaf of autograd; shares storage with the parameters."""
    b_RO: Tensor
    """The same, transposed."""
    gradient_sinks: tuple[Tensor, Tensor]
    """Where dA and dB are added to."""


class AdapterSlots:
    """The buffers, and which rank rows of them are taken.

    Args:
        layers: the layers to adapt.
        num_slots: most jobs at a time.
        rank_rows: sum of ranks that fit.
        device: where the buffers go. They take `rank_rows` x W x 16 bytes.
    """

    def __init__(self, layers: Sequence[LinearLayer], *, num_slots: int, rank_rows: int, device: torch.device):
        self.layers, self.num_slots, self.rank_rows = tuple(layers), num_slots, rank_rows
        self._columns: dict[int, tuple[slice, slice]] = {}
        width = 0
        for layer in self.layers:
            a, width = _columns(width, layer.d_in)
            b, width = _columns(width, layer.d_out)
            self._columns[layer.index] = (a, b)
        self._params_RW, self._grads_RW, self._exp_avg_RW, self._exp_avg_sq_RW = (
            torch.zeros(rank_rows, width, dtype=torch.float32, device=device) for _ in range(4)
        )
        self._taken: dict[int, int] = {}

    def of_layer(self, layer: LinearLayer) -> LayerAdapters:
        """All adapters of one layer, as views of the buffers."""
        a, b = self._columns[layer.index]
        return LayerAdapters(
            a_RI=self._params_RW[:, a].detach().requires_grad_(),
            b_RO=self._params_RW[:, b].detach().requires_grad_(),
            gradient_sinks=(self._grads_RW[:, a], self._grads_RW[:, b]),
        )

    def find(self, lora_rank: int) -> int | None:
        """First rank row of the first gap that is large enough; None when there is none, or no slot is free."""
        if len(self._taken) >= self.num_slots:
            return None
        start = 0
        for taken_start, taken_rank in sorted(self._taken.items()):
            if taken_start - start >= lora_rank:
                return start
            start = taken_start + taken_rank
        return start if self.rank_rows - start >= lora_rank else None

    def take(self, lora_rank: int) -> SlotBlock:
        """Take rank rows for one job; `find` said that they fit. They hold zeros."""
        start = self.find(lora_rank)
        assert start is not None, "ask `find` first"
        self._taken[start] = lora_rank
        rows = slice(start, start + lora_rank)
        return SlotBlock(
            rank_start=start,
            params_rW=self._params_RW[rows],
            grads_rW=self._grads_RW[rows],
            exp_avg_rW=self._exp_avg_RW[rows],
            exp_avg_sq_rW=self._exp_avg_sq_RW[rows],
        )

    def give_back(self, block: SlotBlock) -> None:
        """Zero a block and free its rank rows."""
        assert self._taken.get(block.rank_start) == block.lora_rank
        block.clear()
        del self._taken[block.rank_start]

    def by_layer(
        self, buffer_rW: Tensor, layers: Sequence[LinearLayer]
    ) -> Iterator[tuple[LinearLayer, Tensor, Tensor]]:
        """Each layer with its A [r, I] and transposed B [r, O] inside a block's buffer, as views."""
        for layer in layers:
            a, b = self._columns[layer.index]
            yield layer, buffer_rW[:, a], buffer_rW[:, b]


def _columns(start: int, width: int) -> tuple[slice, int]:
    end = start + width
    return slice(start, end), -(-end // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT
