"""Strategy `random`: distinct combinations, drawn one by one."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar, Literal

from alto_core.config.fields import Count
from alto_core.config.search.dimensions import Dimensions, LogRange
from alto_core.domain import LoraJob
from alto_core.errors import TaskFileError

MAX_DRAWS_PER_JOB = 1000
MAX_DRAWS = 1_000_000
"""Of one search, within seconds, however many jobs it asks for."""


class RandomSpace(Dimensions):
    """Distinct random combinations."""

    in_words: ClassVar[str] = "drawn at random"
    strategy: Literal["random"]
    num_jobs: Count
    """How many to draw."""
    search_seed: int = 0
    """Seeds the draws."""

    def expand(self, all_linear: tuple[str, ...], betas: Sequence[float | None]) -> tuple[LoraJob, ...]:
        num_combinations = self.count_combinations(all_linear, betas)
        if not isinstance(self.learning_rate, LogRange) and self.num_jobs > num_combinations:
            raise self._too_few(num_combinations)
        return self._drawn(all_linear, betas)

    def _drawn(self, all_linear: tuple[str, ...], betas: Sequence[float | None]) -> tuple[LoraJob, ...]:
        """Draw until `num_jobs` distinct jobs are found. Each draw picks one value per dimension."""
        draw = random.Random(self.search_seed)  # noqa: S311 - a search, not a secret
        jobs: dict[str, LoraJob] = {}

        @lru_cache(maxsize=64)
        def options(rate: float) -> list[tuple[str, LoraJob]]:
            return [(job.job_id, job) for job in self.combinations([rate], all_linear, betas)]

        for _ in range(min(self.num_jobs * MAX_DRAWS_PER_JOB, MAX_DRAWS)):
            if len(jobs) == self.num_jobs:
                break
            job_id, job = draw.choice(options(_draw_rate(draw, self.learning_rate)))
            jobs.setdefault(job_id, job)
        if len(jobs) < self.num_jobs:
            raise self._too_few(len(jobs))
        return tuple(jobs.values())

    def _too_few(self, num_distinct: int) -> TaskFileError:
        return TaskFileError(
            "search_space.num_jobs",
            got=str(self.num_jobs),
            expected=f"at most {num_distinct}, the distinct jobs of this space",
            hint="Add values, or ask for fewer jobs.",
        )


def _draw_rate(draw: random.Random, rates: list[float] | LogRange) -> float:
    if not isinstance(rates, LogRange):
        return draw.choice(rates)
    if rates.log:
        return float(f"{math.exp(draw.uniform(math.log(rates.min), math.log(rates.max))):.3g}")
    return float(f"{draw.uniform(rates.min, rates.max):.3g}")
