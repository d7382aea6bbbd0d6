"""Strategy `grid`: every combination of the values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from alto_core.config.search.dimensions import Dimensions, LogRange
from alto_core.domain import LoraJob


class GridSpace(Dimensions):
    """Every combination."""

    in_words: ClassVar[str] = "every combination"
    strategy: Literal["grid"] = "grid"

    @model_validator(mode="after")
    def _no_range(self) -> Self:
        if isinstance(self.learning_rate, LogRange):
            raise ValueError("a list of learning rates: a range needs `strategy: random`")
        return self

    def expand(self, all_linear: tuple[str, ...], betas: Sequence[float | None]) -> tuple[LoraJob, ...]:
        assert not isinstance(self.learning_rate, LogRange)
        self.count_combinations(all_linear, betas)
        return tuple(self.combinations(self.learning_rate, all_linear, betas))
