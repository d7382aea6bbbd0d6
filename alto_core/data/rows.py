"""The values that leave the data room: token rows, generation rows, splits, the data set with its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from alto_core.data.report import DataReport


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """One row as the engine trains on it."""

    row_id: int
    """Unique over all splits of a data set; rises with the position in the source."""
    origin: str
    """Where the row stands, for example `train.jsonl:17`."""
    token_ids: tuple[int, ...]
    label_mask: tuple[bool, ...]
    """True: this token is a trained target. Never position 0, which nothing predicts."""

    @property
    def num_labels(self) -> int:
        return sum(self.label_mask)


@dataclass(frozen=True, kw_only=True)
class GenerationRow:
    """One row as the evaluation generates from it: the last answer is left to the model."""

    row_id: int
    """That of the token row; `prompt_ids` is a prefix of its `token_ids`."""
    prompt_ids: tuple[int, ...]
    reference: str
    """The answer as it stands in the data, without stop token."""
    origin: str


@dataclass(frozen=True, kw_only=True)
class SplitData:
    """The rows of one split, in the order of the source."""

    name: str
    rows: tuple[TokenRow, ...]
    generation_rows: tuple[GenerationRow, ...]
    """Empty for format `text`; may lack a row whose last answer was cut off."""


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """A data set, ready for training and evaluation with one model."""

    train: SplitData
    validation: SplitData
    test: SplitData | None
    digest: str
    """Twelve digits over all rows, masks, references and split membership."""
    report: DataReport
    stop_token_ids: tuple[int, ...]
    """Tokens that end an answer."""
    pad_token_id: int
    """An existing token of the model. ALTO packs rows; it is for whoever serves an adapter in padded batches."""
    max_length: int
    """No row is longer, in tokens."""

    @property
    def splits(self) -> tuple[SplitData, ...]:
        return (self.train, self.validation) if self.test is None else (self.train, self.validation, self.test)


def data_digest(
    splits: Iterable[SplitData], *, stop_token_ids: tuple[int, ...], pad_token_id: int, max_length: int
) -> str:
    """Twelve digits that change when any token, label, reference or split membership does; file names do not count."""
    digest = hashlib.sha256(repr((stop_token_ids, pad_token_id, max_length)).encode())
    for split in splits:
        digest.update(f"split {split.name} {len(split.rows)} {len(split.generation_rows)}".encode())
        for row in split.rows:
            digest.update(f"row {row.row_id} {len(row.token_ids)}".encode())
            digest.update(np.array(row.token_ids, dtype="<i4").tobytes())
            digest.update(np.array(row.label_mask, dtype=np.uint8).tobytes())
        for item in split.generation_rows:
            reference = item.reference.encode()
            digest.update(f"generation {item.row_id} {len(item.prompt_ids)} {len(reference)}".encode())
            digest.update(np.array(item.prompt_ids, dtype="<i4").tobytes())
            digest.update(reference)
    return digest.hexdigest()[:12]
