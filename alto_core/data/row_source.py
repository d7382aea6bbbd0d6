"""One row as a file or a data set gives it, before anything is known about its columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from alto_core.data.report import UnusableRowError


@dataclass(frozen=True, kw_only=True)
class SourceRow:
    """What was read for one row, or why it could not be read."""

    origin: str
    """`train.jsonl:17` (line) or `train.parquet row 17` (both counted from 1)."""
    content: Any
    """Normally a mapping from column to value; the raw text where `problem` is set."""
    problem: UnusableRowError | None = None
