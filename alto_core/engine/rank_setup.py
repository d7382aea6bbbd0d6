"""What the process that trains and a rank agree on before the first call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from alto_core.config import ModelSection

BROKEN_EXIT_CODE = 70
"""Of a rank that has said why it ends."""


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """What a rank is told before anything else."""

    rank: int
    num_ranks: int
    device: str
    section: ModelSection
    sharded: bool
    """Each rank holds a part of the decoder layers; else all of the model."""
    folder: Path
    """Where the ranks of the group meet."""
