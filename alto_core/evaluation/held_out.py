"""Whether two tasks hold out the same rows: what their adapters must share before their scores may be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from alto_core.data.rows import SplitData


def held_out_digest(split: SplitData, stop_token_ids: Sequence[int]) -> str:
    """Twelve digits over tokens, labels and references of a split, in order; where the rows came from does not count.

    `data.rows.data_digest` counts training rows and row numbers as well, so it differs where only those do.
    """
    digest = hashlib.sha256(repr(tuple(stop_token_ids)).encode())
    references = {row.row_id: (len(row.prompt_ids), row.reference) for row in split.generation_rows}
    for row in split.rows:
        digest.update(repr((row.token_ids, row.label_mask, references.get(row.row_id))).encode())
    return digest.hexdigest()[:12]
