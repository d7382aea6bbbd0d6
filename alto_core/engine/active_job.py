"""A job that holds a slot: what it is, where its rank rows lie, how far it has come, and the best adapter so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from alto_core.domain import JobBudget, LoraJob
from alto_core.engine.adapter_plan import AdaptedLayer
from alto_core.engine.slots import SlotBlock
from alto_core.engine.target_modules import LinearLayer
from kernels.random_mask import segment_seed
from kernels.segments import SegmentSpec


@dataclass(kw_only=True, eq=False)
class ActiveJob:
    """The one mutable record of a job inside the engine."""

    job: LoraJob
    budget: JobBudget | None
    """None for an adapter that was loaded for inference only."""
    block: SlotBlock
    plan: tuple[AdaptedLayer, ...]
    """Layers that the job adapts, each with its rank."""
    lowest_layer: int = 0
    """Index of a linear layer before which the job adapts none; 0 where that would be worth nothing."""
    side_ratios_W: Tensor | None = None
    """Learning rate of each column over the job's own; None: all are trained at the job's own."""
    step: int = 0
    """Updates made."""
    best_val_loss: float | None = None
    best_step: int | None = None
    layers: tuple[LinearLayer, ...] = field(init=False)
    layer_indices: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.layers = tuple(adapted.layer for adapted in self.plan)
        self.layer_indices = frozenset(layer.index for layer in self.layers)

    def segment(self, num_tokens: int) -> SegmentSpec:
        """The job's share of a pass without dropout: evaluation and generation."""
        return SegmentSpec(
            num_tokens=num_tokens, rank_start=self.block.rank_start, lora_rank=self.job.rank_rows, scale=self.job.scale
        )

    def training_segment(self, num_tokens: int, micro_step: int) -> SegmentSpec:
        """The job's share of one micro step of its next update."""
        return SegmentSpec(
            num_tokens=num_tokens,
            rank_start=self.block.rank_start,
            lora_rank=self.job.rank_rows,
            scale=self.job.scale,
            dropout=self.job.dropout,
            dropout_seed=segment_seed(job_seed=self.job.seed, update=self.step + 1, micro_step=micro_step),
        )

    @property
    def trained_block(self) -> SlotBlock:
        """The rank rows that the optimizer moves."""
        return self.block.first_rows(self.job.trained_rows)

    def keep_best(self, val_loss: float) -> bool:
        """Set the adapter aside if its validation loss is the lowest so far. A loss that is not finite never is."""
        if not val_loss < (float("inf") if self.best_val_loss is None else self.best_val_loss):
            return False
        self.block.best_rW.copy_(self.block.params_rW)
        self.best_val_loss, self.best_step = val_loss, self.step
        return True

    def best_or_current(self) -> Tensor:
        """Rank rows of the adapter with the lowest validation loss, or of the current one where there is none."""
        return self.block.params_rW if self.best_step is None else self.block.best_rW

    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.block.params_rW).all())
