"""Rows of many jobs in one flat token sequence, without padding, as arrays on the host.

Shape legend: T tokens of the pack, N rows, N1 = N + 1, S1 = slots + 1, P labels. Rows of a slot lie side by side,
slot after slot. Position t predicts token t + 1 of the same row, so a label's logits stand one position before it.

A preference pair becomes two rows of the pack, chosen and rejected. With a shared prompt the second holds the rejected
answer alone and has the pair's prompt, at the start of the row before it, as its *prefix*: its positions go on behind
the prompt, its tokens attend to it, and its first label is predicted from the prompt's last token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from alto_core.data.rows import PairRow, TokenRow


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
    """The position whose logits predict the label. Rising, but for the first label of a row with a prefix."""
    label_ids_P: NDArray[np.int64]
    """The token that is to be predicted."""
    label_rows_P: NDArray[np.int64]
    """The label's row, 0 .. N - 1."""
    row_slots: tuple[int, ...]
    """Slot of each row."""
    row_lengths: tuple[int, ...]
    """Tokens of each row."""
    row_prefixes: tuple[int, ...]
    """So many tokens at the start of the row before it come before each row's own; mostly 0."""

    @property
    def num_shared_tokens(self) -> int:
        """Tokens that stand once in the pack and count for two rows."""
        return sum(self.row_prefixes)

    @property
    def longest_row(self) -> int:
        """Tokens that the longest row attends to."""
        return max(prefix + length for prefix, length in zip(self.row_prefixes, self.row_lengths, strict=True))

    @property
    def num_tokens(self) -> int:
        return sum(self.row_lengths)

    @property
    def num_rows(self) -> int:
        return len(self.row_lengths)


def pack_rows(rows_by_slot: Sequence[Sequence[TokenRow]], *, share_prompts: bool = True) -> PackedBatch:
    """Lay the rows of all slots one after the other.

    Args:
        rows_by_slot: for each slot its rows; a slot without rows takes no tokens.
        share_prompts: preference pairs keep their prompt once; False repeats it for each answer.
    """
    laid_by_slot = [[part for row in slot_rows for part in _parts(row, share_prompts)] for slot_rows in rows_by_slot]
    parts = [part for slot_parts in laid_by_slot for part in slot_parts]
    row_lengths = [len(part.token_ids) for part in parts]
    row_offsets = _cumulative(row_lengths)
    slot_offsets = _cumulative([sum(len(part.token_ids) for part in slot_parts) for slot_parts in laid_by_slot])
    num_tokens = row_offsets[-1]
    token_ids = _flat([part.token_ids for part in parts], np.int64, num_tokens)
    label_mask = _flat([part.label_mask for part in parts], np.bool_, num_tokens)
    lengths = np.array(row_lengths, dtype=np.int64)
    starts = np.array(row_offsets[:-1], dtype=np.int64)
    prefixes = np.array([part.prefix for part in parts], dtype=np.int64)
    row_of_token = np.repeat(np.arange(len(parts)), lengths)
    is_bare = (lengths > 0) & (prefixes == 0)
    assert not label_mask[starts[is_bare]].any(), "nothing predicts a row's first token"
    targets = np.flatnonzero(label_mask)
    predicting = targets - 1
    label_rows = row_of_token[targets]
    follows_prefix = (prefixes[label_rows] > 0) & (targets == starts[label_rows])
    behind = label_rows[follows_prefix]
    predicting[follows_prefix] = starts[behind - 1] + prefixes[behind] - 1

    return PackedBatch(
        token_ids_T=token_ids,
        position_ids_T=np.arange(num_tokens) - np.repeat(starts - prefixes, lengths),
        row_offsets_N1=np.array(row_offsets, dtype=np.int32),
        slot_offsets_S1=np.array(slot_offsets, dtype=np.int32),
        label_positions_P=predicting,
        label_ids_P=token_ids[targets],
        label_rows_P=label_rows,
        row_slots=tuple(slot for slot, slot_parts in enumerate(laid_by_slot) for _ in slot_parts),
        row_lengths=tuple(row_lengths),
        row_prefixes=tuple(part.prefix for part in parts),
    )


def packed_tokens(row: TokenRow, *, share_prompts: bool) -> int:
    """Tokens that a row takes in a pack."""
    if share_prompts or not isinstance(row, PairRow):
        return len(row.token_ids)
    return len(row.token_ids) + row.prompt_length


class _Part(NamedTuple):
    """One row of the pack."""

    token_ids: Sequence[int]
    label_mask: Sequence[bool]
    prefix: int


def _parts(row: TokenRow, share_prompts: bool) -> Iterator[_Part]:
    if share_prompts and isinstance(row, PairRow):
        start = row.rejected_start
        yield _Part(row.token_ids[:start], row.label_mask[:start], 0)
        yield _Part(row.token_ids[start:], row.label_mask[start:], row.prompt_length)
        return
    for side in row.sides:
        yield _Part(side.token_ids, side.label_mask, 0)


def _cumulative(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def _flat(parts: Sequence[Sequence[int]], dtype: type[np.generic], size: int) -> NDArray[Any]:
    return np.fromiter(itertools.chain.from_iterable(parts), dtype=dtype, count=size)
