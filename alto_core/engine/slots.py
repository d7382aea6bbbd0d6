"""Where all adapters live: one flat set of rank rows for parameters, gradients, both AdamW moments and the best so far.

    params_RW  [R rank rows, W columns], W = every adapted layer's A row [d_in] and B row [d_out], side by side

A job of rank r owns r neighbouring rank rows, so its whole adapter is one contiguous block: reset, norm, clip, AdamW
and checkpoint of a job are operations on one block, and nothing is padded to a largest rank. Columns of layers that a
job does not adapt stay exactly zero. Each layer's columns start at a multiple of 64 bytes, so that results do not
depend on which rows a job got. Where the backbone computes in half precision on kernels, a shadow of the parameters in
that dtype is what the layers read; the update writes both.

Shape suffixes: R rank rows, W columns, r one job's rank, I input width, O output width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alto_core.engine.target_modules import LinearLayer

COLUMN_ALIGNMENT = 16
"""Floats in 64 bytes."""
BUFFERS = 5
"""Parameters, gradients, two moments and the best parameters, a float32 each."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotBlock:
    """One job's slot and rank rows, as views of the buffers."""

    slot: int
    """0 .. number of slots - 1."""
    rank_start: int
    params_rW: Tensor
    grads_rW: Tensor
    exp_avg_rW: Tensor
    exp_avg_sq_rW: Tensor
    best_rW: Tensor
    """Where the parameters of the lowest validation loss are set aside."""
    shadow_rW: Tensor | None

    @property
    def lora_rank(self) -> int:
        return int(self.params_rW.shape[0])

    def first_rows(self, count: int) -> SlotBlock:
        """The block's first rank rows, as views."""
        if count == self.lora_rank:
            return self
        return dataclasses.replace(
            self,
            params_rW=self.params_rW[:count],
            grads_rW=self.grads_rW[:count],
            exp_avg_rW=self.exp_avg_rW[:count],
            exp_avg_sq_rW=self.exp_avg_sq_rW[:count],
            best_rW=self.best_rW[:count],
            shadow_rW=None if self.shadow_rW is None else self.shadow_rW[:count],
        )

    def clear(self) -> None:
        """Zero everything, so that the next job finds no trace of this one."""
        for buffer in (self.params_rW, self.grads_rW, self.exp_avg_rW, self.exp_avg_sq_rW, self.best_rW):
            buffer.zero_()
        self.publish()

    def publish(self) -> None:
        """Let the layers see parameters that were written from outside of the update."""
        if self.shadow_rW is not None:
            self.shadow_rW.copy_(self.params_rW)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerAdapters:
    """What one wrapped layer reads and writes."""

    a_RI: Tensor
    """Leaf of autograd; shares storage with the parameters or their shadow."""
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
        device: where the buffers go. They take `rank_rows` x W x 20 bytes.
        shadow_dtype: what the layers read; its shadow takes `rank_rows` x W elements. None: the parameters themselves.
    """

    def __init__(
        self,
        layers: Sequence[LinearLayer],
        *,
        num_slots: int,
        rank_rows: int,
        device: torch.device,
        shadow_dtype: torch.dtype | None = None,
    ):
        self.layers, self.num_slots, self.rank_rows = tuple(layers), num_slots, rank_rows
        self._columns: dict[int, tuple[slice, slice]] = {}
        width = 0
        for layer in self.layers:
            a, width = _columns(width, layer.d_in)
            b, width = _columns(width, layer.d_out)
            self._columns[layer.index] = (a, b)
        self.params_RW, self.grads_RW, self.exp_avg_RW, self.exp_avg_sq_RW, self._best_RW = (
            torch.zeros(rank_rows, width, dtype=torch.float32, device=device) for _ in range(BUFFERS)
        )
        self.shadow_RW = None if shadow_dtype is None else torch.zeros_like(self.params_RW, dtype=shadow_dtype)
        self._taken: dict[int, SlotBlock] = {}

    def of_layer(self, layer: LinearLayer) -> LayerAdapters:
        """All adapters of one layer, as views of the buffers."""
        a, b = self._columns[layer.index]
        read_RW = self.params_RW if self.shadow_RW is None else self.shadow_RW
        return LayerAdapters(
            a_RI=read_RW[:, a].detach().requires_grad_(),
            b_RO=read_RW[:, b].detach().requires_grad_(),
            gradient_sinks=(self.grads_RW[:, a], self.grads_RW[:, b]),
        )

    def by_side(self, a: float, b: float) -> Tensor:
        """float32 [W], one value in all columns of A and another in all of B."""
        values_W = torch.full_like(self.params_RW[0], b)
        for columns, _ in self._columns.values():
            values_W[columns] = a
        return values_W

    def find(self, lora_rank: int, rank_start: int | None = None) -> int | None:
        """First rank row of the first gap that is large enough; None when there is none, or no slot is free.

        Args:
            lora_rank: rank rows that are needed.
            rank_start: only these rank rows will do; None: any.
        """
        if len(self._taken) >= self.num_slots:
            return None
        start = 0
        for taken_start, block in [*sorted(self._taken.items()), (self.rank_rows, None)]:
            wanted = start if rank_start is None else rank_start
            if start <= wanted and wanted + lora_rank <= taken_start:
                return wanted
            start = taken_start + (0 if block is None else block.lora_rank)
        return None

    def take(self, lora_rank: int, rank_start: int | None = None) -> SlotBlock:
        """Take rank rows for one job, from this one on or where `find` says; they must be free. They hold zeros."""
        start = self.find(lora_rank, rank_start)
        assert start is not None, "ask `find` first"
        rows = slice(start, start + lora_rank)
        taken_slots = {block.slot for block in self._taken.values()}
        block = SlotBlock(
            slot=next(slot for slot in range(self.num_slots) if slot not in taken_slots),
            rank_start=start,
            params_rW=self.params_RW[rows],
            grads_rW=self.grads_RW[rows],
            exp_avg_rW=self.exp_avg_RW[rows],
            exp_avg_sq_rW=self.exp_avg_sq_RW[rows],
            best_rW=self._best_RW[rows],
            shadow_rW=None if self.shadow_RW is None else self.shadow_RW[rows],
        )
        self._taken[start] = block
        return block

    def give_back(self, block: SlotBlock) -> None:
        """Zero a block and free its rank rows."""
        assert self._taken.get(block.rank_start) is block
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
