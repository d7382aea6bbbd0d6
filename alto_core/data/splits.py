"""Which usable rows are held out, and the removal of rows that stand in two splits.

A row's place depends on its tokens and the seed alone: adding or reordering rows moves no other row between splits, and
equal rows go to the same side; so do preference pairs of one prompt, except where the count falls among them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from alto_core.config import SplitSection
from alto_core.data.tokenization import TokenizedRow


def is_own_source(split: SplitSection) -> bool:
    """Whether a split has rows of its own; otherwise they are set aside from the training source."""
    return split.source is not None or split.split is not None


def num_set_aside(split: SplitSection, num_rows: int) -> int:
    """Rows that a split takes from a training source of `num_rows` usable rows: at least one for a share."""
    if split.rows is not None:
        return split.rows
    assert split.share is not None
    return max(1, round(split.share * num_rows))


def set_aside(rows: Sequence[TokenizedRow], count: int, seed: int) -> tuple[list[TokenizedRow], list[TokenizedRow]]:
    """Take `count` rows by their digests; both parts keep the order of the source.

    Returns:
        the rows set aside, and the others.
    """
    order = sorted(range(len(rows)), key=lambda i: (_place(rows[i], seed), rows[i].row.row_id))
    chosen = set(order[:count])
    return [rows[i] for i in sorted(chosen)], [row for i, row in enumerate(rows) if i not in chosen]


def without_duplicates(
    rows: Iterable[TokenizedRow], held_out: Iterable[TokenizedRow]
) -> tuple[list[TokenizedRow], list[TokenizedRow]]:
    """Part rows into those that are new and those whose tokens equal a held-out row's."""
    known = {row.row.token_ids for row in held_out}
    new: list[TokenizedRow] = []
    repeated: list[TokenizedRow] = []
    for row in rows:
        (repeated if row.row.token_ids in known else new).append(row)
    return new, repeated


def _place(row: TokenizedRow, seed: int) -> bytes:
    ids = np.array(row.row.split_key, dtype="<i4").tobytes()
    return hashlib.blake2b(ids, digest_size=8, key=str(seed).encode()[:64]).digest()
