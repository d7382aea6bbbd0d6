"""Losses of held-out rows, row by row, for many adapters in shared forward passes.

Every row's number is a sum over its own tokens, so it does not depend on which rows or adapters share a pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from alto_core.data.packing import PackedBatch, pack_rows
from alto_core.data.rows import TokenRow
from alto_core.domain import RowLosses
from alto_core.engine.active_job import ActiveJob
from alto_core.engine.losses import sums_by_row
from alto_core.engine.pass_inputs import NOBODY
from alto_core.engine.passes import PassKind, PassRunner, PassWork
from kernels.segments import SegmentSpec

_Item = tuple[int, int]
"""Number of the adapter, number of the row."""


def row_losses(
    runner: PassRunner,
    adapters: Sequence[ActiveJob | None],
    rows: Sequence[TokenRow],
    *,
    max_tokens: int,
) -> list[RowLosses]:
    """Evaluate each adapter (None: the untuned model) on all rows. Waits for the device once.

    Args:
        max_tokens: of one forward pass; a longer row gets a pass of its own.

    Returns:
        One value per adapter, its entries in the order of `rows`; a row without labels has loss 0 and 0 labels.
    """
    done: list[tuple[list[_Item], PackedBatch]] = []
    losses = []
    for items in _passes(len(adapters), rows, max_tokens):
        work = _work(adapters, rows, items)
        losses.append(runner.run(PassKind.LOSSES, work).clone())
        done.append((items, work.batch))
    sums = np.zeros((len(adapters), len(rows)))
    if losses:
        parts = torch.cat(losses).cpu().numpy()
        start = 0
        for items, batch in done:
            end = start + len(batch.label_ids_P)
            adapter_numbers, row_numbers = np.array(items).T
            sums[adapter_numbers, row_numbers] = sums_by_row(parts[start:end], batch.label_rows_P, batch.num_rows)
            start = end
    num_labels = tuple(row.num_labels for row in rows)
    return [RowLosses(loss_sums=tuple(adapter_sums.tolist()), num_labels=num_labels) for adapter_sums in sums]


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


def _work(adapters: Sequence[ActiveJob | None], rows: Sequence[TokenRow], items: Sequence[_Item]) -> PassWork:
    groups = [
        (adapters[number], [rows[i] for _, i in part])
        for number, part in itertools.groupby(items, key=lambda item: item[0])
    ]
    batch = pack_rows([part for _, part in groups])
    specs = []
    for active, part in groups:
        tokens = sum(len(row.token_ids) for row in part)
        specs.append(SegmentSpec(num_tokens=tokens) if active is None else active.segment(tokens))
    return PassWork(
        batch=batch,
        specs=tuple(specs),
        layers_by_segment=tuple(frozenset[int]() if active is None else active.layer_indices for active, _ in groups),
        label_weights_P=np.zeros(len(batch.label_ids_P), np.float32),
        label_slots_P=np.full(len(batch.label_ids_P), NOBODY, np.int32),
    )
