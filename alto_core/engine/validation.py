"""Losses of held-out rows, side by side, for many adapters in shared forward passes.

Every number is a sum over tokens of one sequence, so it does not depend on which rows or adapters share a pass. A plain
row has one side; a preference pair has two.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from alto_core.data.packing import PackedBatch, pack_rows, packed_tokens
from alto_core.data.rows import TokenRow
from alto_core.engine.active_job import ActiveJob
from alto_core.engine.capture_choice import PassKind
from alto_core.engine.losses import sums_by_row
from alto_core.engine.objective import LabelFields
from alto_core.engine.pass_inputs import NOBODY
from alto_core.engine.passes import PassRunner, PassWork
from alto_core.engine.step import even_passes
from kernels.segments import SegmentSpec

EVALUATION_TOKENS = 8192
"""Of an evaluation pass, where training passes have fewer."""

Item = tuple[int, int]
"""Number of the adapter, number of the row."""


def side_losses(
    runner: PassRunner,
    adapters: Sequence[ActiveJob | None],
    rows: Sequence[TokenRow],
    *,
    max_tokens: int,
) -> NDArray[np.float64]:
    """Evaluate each adapter (None: the untuned model) on all rows. Waits for the device once.

    Args:
        max_tokens: of one forward pass; a longer row gets a pass of its own.

    Returns:
        Sums of token losses [adapters, rows, 2], in the order of `rows`; 0 for a side that a row does not have, and
        for a row without labels.
    """
    done: list[tuple[list[Item], PackedBatch]] = []
    losses = []
    for items in evaluation_passes(len(adapters), rows, max_tokens, share_prompts=runner.share_prompts):
        work = _work(adapters, rows, items, share_prompts=runner.share_prompts)
        losses.append(runner.run(PassKind.LOSSES, work).clone())
        done.append((items, work.batch))
    sums = np.zeros((len(adapters), len(rows), 2))
    if losses:
        parts = torch.cat(losses).cpu().numpy()
        start = 0
        for items, batch in done:
            end = start + len(batch.label_ids_P)
            places = [(*item, side) for item in items for side in range(len(rows[item[1]].sides))]
            sums[tuple(np.array(places).T)] = sums_by_row(parts[start:end], batch.label_rows_P, batch.num_rows)
            start = end
    return sums


def evaluation_tokens(max_pass_tokens: int) -> int:
    """Tokens of an evaluation pass, where training passes have at most so many: without gradients it takes less."""
    return max(EVALUATION_TOKENS, max_pass_tokens)


def evaluation_passes(
    num_adapters: int, rows: Sequence[TokenRow], max_tokens: int, *, share_prompts: bool
) -> Iterator[list[Item]]:
    """Items of each pass: adapter by adapter, rows of like length together, so that attention pads little.

    Args:
        num_adapters: that are evaluated side by side.
        rows: those without labels are left out.
        max_tokens: of one forward pass; a longer row gets a pass of its own.
        share_prompts: as in `packed_tokens`.
    """
    by_length = sorted((i for i, row in enumerate(rows) if row.num_labels), key=lambda i: len(rows[i].token_ids))
    items = list(itertools.product(range(num_adapters), by_length))
    sizes = [packed_tokens(rows[row_number], share_prompts=share_prompts) for _, row_number in items]
    for together in even_passes(sizes, max_tokens):
        yield [items[i] for i in together]


def _work(
    adapters: Sequence[ActiveJob | None], rows: Sequence[TokenRow], items: Sequence[Item], *, share_prompts: bool
) -> PassWork:
    groups = [
        (adapters[number], [rows[i] for _, i in part])
        for number, part in itertools.groupby(items, key=lambda item: item[0])
    ]
    batch = pack_rows([part for _, part in groups], share_prompts=share_prompts)
    specs = []
    for active, part in groups:
        tokens = sum(packed_tokens(row, share_prompts=share_prompts) for row in part)
        specs.append(SegmentSpec(num_tokens=tokens) if active is None else active.segment(tokens))
    return PassWork(
        batch=batch,
        specs=tuple(specs),
        layers_by_segment=tuple(frozenset[int]() if active is None else active.layer_indices for active, _ in groups),
        fields=LabelFields(
            label_weights_P=np.zeros(len(batch.label_ids_P), np.float32),
            label_slots_P=np.full(len(batch.label_ids_P), NOBODY, np.int32),
        ),
    )
