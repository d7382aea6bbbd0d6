"""Losses of held-out rows, row by row, for many adapters in shared forward passes.

Every row's number is a sum over its own tokens, so it does not depend on which rows or adapters share a pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from alto_core.data.packing import pack_rows
from alto_core.data.rows import TokenRow
from alto_core.domain import RowLosses
from alto_core.engine.active_job import ActiveJob
from alto_core.engine.backbone import Backbone
from alto_core.engine.lora_linear import LoraRouting
from alto_core.engine.losses import row_loss_sums, token_losses
from kernels.segments import SegmentSpec, make_segments

_Item = tuple[int, int]
"""Number of the adapter, number of the row."""


@torch.inference_mode()
def row_losses(
    backbone: Backbone,
    routing: LoraRouting,
    adapters: Sequence[ActiveJob | None],
    rows: Sequence[TokenRow],
    *,
    max_tokens: int,
) -> list[RowLosses]:
    """Evaluate each adapter (None: the untuned model) on all rows.

    Args:
        max_tokens: of one forward pass; a longer row gets a pass of its own.

    Returns:
        One value per adapter, its entries in the order of `rows`; a row without labels has loss 0 and 0 labels.
    """
    sums = [[0.0] * len(rows) for _ in adapters]
    for items in _passes(len(adapters), rows, max_tokens):
        for (adapter_number, row_number), loss_sum in zip(
            items, _loss_sums(backbone, routing, adapters, rows, items), strict=True
        ):
            sums[adapter_number][row_number] = loss_sum
    num_labels = tuple(row.num_labels for row in rows)
    return [RowLosses(loss_sums=tuple(adapter_sums), num_labels=num_labels) for adapter_sums in sums]


def _passes(num_adapters: int, rows: Sequence[TokenRow], max_tokens: int) -> Iterator[list[_Item]]:
    """Adapter by adapter, rows of like length together, so that attention pads little."""
    by_length = sorted((i for i, row in enumerate(rows) if row.num_labels), key=lambda i: len(rows[i].token_ids))
    items: list[_Item] = []
    tokens = 0
    for adapter_number, row_number in itertools.product(range(num_adapters), by_length):
        length = len(rows[row_number].token_ids)
        if items and tokens + length > max_tokens:
            yield items
            items, tokens = [], 0
        items.append((adapter_number, row_number))
        tokens += length
    if items:
        yield items


def _loss_sums(
    backbone: Backbone,
    routing: LoraRouting,
    adapters: Sequence[ActiveJob | None],
    rows: Sequence[TokenRow],
    items: Sequence[_Item],
) -> list[float]:
    groups = [
        (adapters[number], [rows[i] for _, i in part])
        for number, part in itertools.groupby(items, key=lambda item: item[0])
    ]
    batch = pack_rows([part for _, part in groups], backbone.device)
    specs = []
    for active, part in groups:
        tokens = sum(len(row.token_ids) for row in part)
        specs.append(SegmentSpec(num_tokens=tokens) if active is None else active.segment(tokens))
    layers = [frozenset[int]() if active is None else active.layer_indices for active, _ in groups]
    with routing.use(make_segments(specs, backbone.device), layers):
        return row_loss_sums(token_losses(backbone, batch), batch)
