"""The values that leave the data room: token rows, preference pairs, generation rows, splits, the data set."""

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

    @property
    def sides(self) -> tuple[TokenRow, ...]:
        """The sequences that the row stands for: itself."""
        return (self,)

    @property
    def longest_side(self) -> int:
        """Tokens of its longest sequence, which attention sees at once."""
        return len(self.token_ids)

    @property
    def split_key(self) -> tuple[int, ...]:
        """Rows of equal keys go to the same split."""
        return self.token_ids


@dataclass(frozen=True, kw_only=True)
class PairRow(TokenRow):
    """A prompt with a chosen and a rejected answer, laid out as prompt, chosen answer, rejected answer.

    The prompt stands once: the rejected answer follows it as if the chosen one were not there.
    """

    prompt_length: int
    """Tokens of the prompt; at least one."""
    rejected_start: int
    """Where the rejected answer begins in `token_ids`."""

    @property
    def sides(self) -> tuple[TokenRow, ...]:
        """Prompt and chosen answer, prompt and rejected answer, each as a row of its own."""
        return (self._side(self.prompt_length, self.rejected_start), self._side(self.rejected_start, None))

    @property
    def longest_side(self) -> int:
        answers = (self.rejected_start - self.prompt_length, len(self.token_ids) - self.rejected_start)
        return self.prompt_length + max(answers)

    @property
    def split_key(self) -> tuple[int, ...]:
        """The prompt: its pairs stay together."""
        return self.token_ids[: self.prompt_length]

    @property
    def num_chosen_labels(self) -> int:
        return sum(self.label_mask[: self.rejected_start])

    def _side(self, start: int, end: int | None) -> TokenRow:
        prompt = slice(0, self.prompt_length)
        return TokenRow(
            row_id=self.row_id,
            origin=self.origin,
            token_ids=self.token_ids[prompt] + self.token_ids[start:end],
            label_mask=self.label_mask[prompt] + self.label_mask[start:end],
        )


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
    """Empty for format `text`; may lack a row whose last answer was cut off. Of a pair the chosen answer."""


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
    """No row, and no side of a pair, is longer, in tokens."""

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
            if isinstance(row, PairRow):
                digest.update(f"pair {row.prompt_length} {row.rejected_start}".encode())
        for item in split.generation_rows:
            reference = item.reference.encode()
            digest.update(f"generation {item.row_id} {len(item.prompt_ids)} {len(reference)}".encode())
            digest.update(np.array(item.prompt_ids, dtype="<i4").tobytes())
            digest.update(reference)
    return digest.hexdigest()[:12]
