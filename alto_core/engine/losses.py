"""Token losses of a packed batch, in float32, from logits at label positions alone.

Shape suffixes: T tokens, N rows, P labels, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from alto_core.data.packing import PackedBatch
from alto_core.engine.backbone import Backbone, packed_logits
from alto_core.engine.packed_attention import PackedRows

HEAD_ROWS = 16
"""Rows through the output head are a multiple of this. For a few odd rows CPU libraries add up the head's long sums, a
vocabulary each, ten times less exactly, and attention that rests on one token amplifies that a hundredfold."""


def token_losses(backbone: Backbone, batch: PackedBatch) -> Tensor:
    """Negative log-likelihood of every label, nats, float32. The batch holds at least one label."""
    rows = PackedRows(batch.row_lengths, backbone.device)
    num_labels = len(batch.label_ids_P)
    positions = functional.pad(batch.label_positions_P, (0, -num_labels % HEAD_ROWS))
    logits_PV = packed_logits(backbone.model, batch.token_ids_T, batch.position_ids_T, rows, positions)[:num_labels]
    return functional.cross_entropy(logits_PV.float(), batch.label_ids_P, reduction="none")


def row_loss_sums(losses_P: Tensor, batch: PackedBatch) -> list[float]:
    """Sum of token losses of each row, added up in float64; 0 for a row without labels."""
    sums_N = torch.zeros(batch.num_rows, dtype=torch.float64, device=losses_P.device)
    return sums_N.index_add_(0, batch.label_rows_P, losses_P.detach().double()).tolist()
