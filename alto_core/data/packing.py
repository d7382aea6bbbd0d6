"""Rows of many jobs in one flat token sequence, without padding: the one place where data becomes tensors.

Shape legend: T tokens of the pack, N rows, N1 = N + 1, S1 = slots + 1, P labels. Rows of a slot lie side by side,
slot after slot. Position t predicts token t + 1 of the same row, so a label's logits stand one position before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from alto_core.data.rows import TokenRow


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """One joint step's tokens on one device."""

    token_ids_T: torch.Tensor
    """int64."""
    position_ids_T: torch.Tensor
    """int64; restarts at 0 with each row."""
    row_offsets_N1: torch.Tensor
    """int32, cumulative: row n holds tokens [row_offsets[n], row_offsets[n + 1])."""
    slot_offsets_S1: torch.Tensor
    """int32, cumulative tokens: slot s holds tokens [slot_offsets[s], slot_offsets[s + 1])."""
    label_positions_P: torch.Tensor
    """int64, rising: the position whose logits predict the label."""
    label_ids_P: torch.Tensor
    """int64: the token that is to be predicted."""
    label_rows_P: torch.Tensor
    """int64: the label's row, 0 .. N - 1."""
    row_slots: tuple[int, ...]
    """Slot of each row."""
    row_lengths: tuple[int, ...]
    """Tokens of each row, known without asking the device."""

    @property
    def num_tokens(self) -> int:
        return sum(self.row_lengths)

    @property
    def num_rows(self) -> int:
        return len(self.row_lengths)


def pack_rows(rows_by_slot: Sequence[Sequence[TokenRow]], device: torch.device | str) -> PackedBatch:
    """Lay the rows of all slots one after the other.

    Args:
        rows_by_slot: for each slot its rows; a slot without rows takes no tokens.
        device: where the tensors go.
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

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    return PackedBatch(
        token_ids_T=tensor(token_ids),
        position_ids_T=tensor(np.arange(num_tokens) - np.repeat(starts, lengths)),
        row_offsets_N1=tensor(np.array(row_offsets, dtype=np.int32)),
        slot_offsets_S1=tensor(np.array(slot_offsets, dtype=np.int32)),
        label_positions_P=tensor(targets - 1),
        label_ids_P=tensor(token_ids[targets]),
        label_rows_P=tensor(row_of_token[targets]),
        row_slots=tuple(slot for slot, slot_rows in enumerate(rows_by_slot) for _ in slot_rows),
        row_lengths=tuple(row_lengths),
    )


def _cumulative(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def _flat(parts: Sequence[Sequence[int]], dtype: type[np.generic], size: int) -> np.ndarray:
    return np.fromiter(itertools.chain.from_iterable(parts), dtype=dtype, count=size)
