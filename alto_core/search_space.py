"""From a search space to its jobs: grid, random draws, or an explicit list. The same space gives the same jobs."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from alto_core.config import GridSpace, ListedJob, ListSpace, LogRange, RandomSpace
from alto_core.domain import LoraJob
from alto_core.errors import TaskFileError

ALL_LINEAR = "all-linear"
DEFAULT_ALPHA_OVER_RANK = 2.0
MAX_COMBINATIONS = 10_000
"""Of one space: more jobs than any cluster trains, and laying them all out must not take minutes."""
MAX_DRAWS_PER_JOB = 1000
MAX_DRAWS = 1_000_000
"""Of one search, within seconds, however many jobs it asks for."""


def expand_search_space(
    space: GridSpace | RandomSpace | ListSpace,
    linear_names: Sequence[str],
    betas: Sequence[float | None] = (None,),
) -> tuple[LoraJob, ...]:
    """Make the jobs of a search space, without repetition, in a stable order.

    Args:
        space: the checked search space.
        linear_names: name endings of all linear layers of the base model; what `all-linear` stands for.
        betas: of the task's objective, one more dimension; None where it has none.

    Raises:
        TaskFileError: the space has fewer distinct jobs than asked for, or two listed jobs are equal.
    """
    all_linear = tuple(sorted(linear_names))
    if isinstance(space, ListSpace):
        jobs = [_job_from_list(listed, all_linear) for listed in space.jobs]
        for i, job in enumerate(jobs):
            if job in jobs[:i]:
                first = jobs.index(job)
                raise TaskFileError(
                    f"search_space.jobs[{i}]", got=f"the same as jobs[{first}]", expected="a job of its own"
                )
        return tuple(dataclasses.replace(job, beta=beta) for job in jobs for beta in betas)
    rates = [0.0] if isinstance(space.learning_rate, LogRange) else space.learning_rate
    num_combinations = math.prod(map(len, _dimensions(space, rates, all_linear, betas)))
    if num_combinations > MAX_COMBINATIONS:
        raise TaskFileError(
            "search_space",
            got=f"{num_combinations} combinations of its values",
            expected=f"at most {MAX_COMBINATIONS}",
            hint="Leave values out.",
        )
    if isinstance(space, RandomSpace):
        if not isinstance(space.learning_rate, LogRange) and space.num_jobs > num_combinations:
            raise _too_few(space, num_combinations)
        return _random_jobs(space, all_linear, betas)
    assert not isinstance(space.learning_rate, LogRange)
    return tuple(_combinations(space, space.learning_rate, all_linear, betas))


def _combinations(
    space: GridSpace | RandomSpace,
    learning_rates: Sequence[float],
    all_linear: tuple[str, ...],
    betas: Sequence[float | None],
) -> Iterator[LoraJob]:
    dimensions = itertools.product(*_dimensions(space, learning_rates, all_linear, betas))
    for rate, lora_rank, batch_size, (
        alpha,
        over_rank,
    ), dropout, decay, accumulation, rslora, schedule, modules, beta in dimensions:
        yield LoraJob(
            learning_rate=float(rate),
            lora_rank=lora_rank,
            lora_alpha=_alpha(alpha, over_rank, lora_rank),
            use_rslora=rslora,
            dropout=float(dropout),
            adapter_batch_size=batch_size,
            gradient_accumulation=accumulation,
            weight_decay=float(decay),
            max_grad_norm=float(space.max_grad_norm),
            lr_schedule=schedule,
            lr_warmup_fraction=float(space.lr_warmup_fraction),
            target_modules=modules,
            seed=space.seed,
            beta=beta,
        )


def _dimensions(
    space: GridSpace | RandomSpace,
    learning_rates: Sequence[float],
    all_linear: tuple[str, ...],
    betas: Sequence[float | None],
) -> tuple[Sequence[Any], ...]:
    """The values of each dimension."""
    return (
        learning_rates,
        space.lora_rank,
        space.adapter_batch_size,
        _alpha_choices(space.lora_alpha, space.alpha_over_rank),
        space.dropout,
        space.weight_decay,
        space.gradient_accumulation,
        space.use_rslora,
        space.lr_schedule,
        _module_choices(space.target_modules, all_linear),
        betas,
    )


def _random_jobs(space: RandomSpace, all_linear: tuple[str, ...], betas: Sequence[float | None]) -> tuple[LoraJob, ...]:
    """Draw until `num_jobs` distinct jobs are found. Each draw picks one value per dimension."""
    draw = random.Random(space.search_seed)  # noqa: S311 - a search, not a secret
    jobs: dict[str, LoraJob] = {}

    @lru_cache(maxsize=64)
    def options(rate: float) -> list[tuple[str, LoraJob]]:
        return [(job.job_id, job) for job in _combinations(space, [rate], all_linear, betas)]

    for _ in range(min(space.num_jobs * MAX_DRAWS_PER_JOB, MAX_DRAWS)):
        if len(jobs) == space.num_jobs:
            break
        rate = _draw_rate(draw, space.learning_rate)
        job_id, job = draw.choice(options(rate))
        jobs.setdefault(job_id, job)
    if len(jobs) < space.num_jobs:
        raise _too_few(space, len(jobs))
    return tuple(jobs.values())


def _too_few(space: RandomSpace, num_distinct: int) -> TaskFileError:
    return TaskFileError(
        "search_space.num_jobs",
        got=str(space.num_jobs),
        expected=f"at most {num_distinct}, the distinct jobs of this space",
        hint="Add values, or ask for fewer jobs.",
    )


def _draw_rate(draw: random.Random, rates: list[float] | LogRange) -> float:
    if not isinstance(rates, LogRange):
        return draw.choice(rates)
    if rates.log:
        return float(f"{math.exp(draw.uniform(math.log(rates.min), math.log(rates.max))):.3g}")
    return float(f"{draw.uniform(rates.min, rates.max):.3g}")


def _job_from_list(listed: ListedJob, all_linear: tuple[str, ...]) -> LoraJob:
    fields = listed.model_dump(exclude={"lora_alpha", "alpha_over_rank", "target_modules"})
    (modules,) = _module_choices(listed.target_modules, all_linear)
    alpha = _alpha(listed.lora_alpha, listed.alpha_over_rank, listed.lora_rank)
    return LoraJob(**fields, lora_alpha=alpha, target_modules=modules)


def _alpha_choices(
    alphas: list[float] | None, over_rank: list[float] | None
) -> list[tuple[float | None, float | None]]:
    if alphas is not None:
        return [(alpha, None) for alpha in alphas]
    return [(None, ratio) for ratio in over_rank or [DEFAULT_ALPHA_OVER_RANK]]


def _alpha(alpha: float | None, over_rank: float | None, lora_rank: int) -> float:
    if alpha is not None:
        return float(alpha)
    return float((over_rank or DEFAULT_ALPHA_OVER_RANK) * lora_rank)


def _module_choices(
    target_modules: str | Sequence[str] | Sequence[Sequence[str]], all_linear: tuple[str, ...]
) -> list[tuple[str, ...]]:
    if target_modules == ALL_LINEAR:
        return [all_linear]
    if isinstance(target_modules[0], str):
        return [tuple(sorted(str(name) for name in target_modules))]
    return [tuple(sorted(names)) for names in target_modules]
