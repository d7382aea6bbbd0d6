"""Rows of many jobs in one flat token sequence, without padding, as arrays on the host.

Shape legend: T tokens of the pack, N rows, N1 = N + 1, S1 = slots + 1, P labels. Rows of a slot lie side by side,
slot after slot. Position t predicts token t + 1 of the same row, so a label's logits stand one position before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alto_core.data.rows import TokenRow


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """The tokens of one pass."""

    token_ids_T: NDArray[np.int64]
    position_ids_T: NDArray[np.int64]
    """Restarts at 0 with each row."""
    row_offsets_N1: NDArray[np.int32]
    """Cumulative: row n holds tokens [row_offsets[n], row_offsets[n + 1])."""
    slot_offsets_S1: NDArray[np.int32]
    """Cumulative tokens: slot s holds tokens [slot_offsets[s], slot_offsets[s + 1])."""
    label_positions_P: NDArray[np.int64]
    """Rising: the position whose logits predict the label."""
    label_ids_P: NDArray[np.int64]
    """The token that is to be predicted."""
    label_rows_P: NDArray[np.int64]
    """The label's row, 0 .. N - 1."""
    row_slots: tuple[int, ...]
    """Slot of each row."""
    row_lengths: tuple[int, ...]
    """Tokens of each row."""

    @property
    def num_tokens(self) -> int:
        return sum(self.row_lengths)

    @property
    def num_rows(self) -> int:
        return len(self.row_lengths)


def pack_rows(rows_by_slot: Sequence[Sequence[TokenRow]]) -> PackedBatch:
    """Lay the rows of all slots one after the other.

    Args:
        rows_by_slot: for each slot its rows; a slot without rows takes no tokens.
    """
    rows = [row for slot_rows in rows_by_slot for row in slot_rows]
    row_lengths = [len(row.token_ids) for row in rows]
    row_offsets = _cumulative(row_lengths)
    slot_offsets = _cumulative([sum(len(row.token_ids) for row in slot_rows) for slot_rows in rows_by_slot])
    num_tokens = row_offsets[-1]
    token_ids = _flat([row.token_ids for row in rows], np.int64, num_tokens)
    label_mask = _flat([row.label_mask for row in rows], np.bool_, num_tokens)
    lengths = np.array(row_lengths, dtype=np.int64)
    starts = np.array(row_offsets[:-1], dtype=np.int64)
    row_of_token = np.repeat(np.arange(len(rows)), lengths)
    assert not label_mask[starts[lengths > 0]].any(), "nothing predicts a row's first token"
    targets = np.flatnonzero(label_mask)

    return PackedBatch(
        token_ids_T=token_ids,
        position_ids_T=np.arange(num_tokens) - np.repeat(starts, lengths),
        row_offsets_N1=np.array(row_offsets, dtype=np.int32),
        slot_offsets_S1=np.array(slot_offsets, dtype=np.int32),
        label_positions_P=targets - 1,
        label_ids_P=token_ids[targets],
        label_rows_P=row_of_token[targets],
        row_slots=tuple(slot for slot, slot_rows in enumerate(rows_by_slot) for _ in slot_rows),
        row_lengths=tuple(row_lengths),
    )


def _cumulative(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def _flat(parts: Sequence[Sequence[int]], dtype: type[np.generic], size: int) -> NDArray[Any]:
    return np.fromiter(itertools.chain.from_iterable(parts), dtype=dtype, count=size)
