"""From a search space to its jobs. The same space gives the same jobs, whichever strategy it has."""

from __future__ import annotations

from collections.abc import Sequence

from alto_core.config import SearchSpace
from alto_core.domain import LoraJob


def expand_search_space(
    space: SearchSpace,
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
    jobs = space.expand(tuple(sorted(linear_names)), betas)
    assert len({job.job_id for job in jobs}) == len(jobs), f"{type(space).__name__} repeats a job"
    return jobs
