"""How long a task will take: before it has run, and while it runs."""

from __future__ import annotations

from collections.abc import Sequence

from alto_core.config import TuningTask
from alto_core.store import JobRecord, Store

UNKNOWN_SECONDS = 3600.0
"""For a task of a model that was never profiled."""
MAX_RECORDS = 200
"""Past tasks looked through for one on the same model."""


def expected_seconds(task: TuningTask, num_tokens: int, store: Store) -> float:
    """What is known of a task's duration, else an hour. The arguments are those of `known_seconds`."""
    known = known_seconds(task, num_tokens, store)
    return UNKNOWN_SECONDS if known is None else known


def known_seconds(task: TuningTask, num_tokens: int, store: Store) -> float | None:
    """What the task file says; else tokens over the throughput profiled last with this model on as many GPUs.

    Args:
        task: the task.
        num_tokens: tokens of all jobs if none ends early, which makes it an upper estimate.
        store: where profiles are kept.

    Returns:
        Seconds; None where the task file says nothing and no such profile is kept.
    """
    if task.cluster.expected_minutes is not None:
        return task.cluster.expected_minutes * 60
    for record in store.tasks(limit=MAX_RECORDS):
        other = record.task
        profile = store.profile(record.task_id)
        if profile and other.model == task.model and other.cluster.num_gpus == task.cluster.num_gpus:
            return num_tokens / max(profile.tokens_per_second, 1e-9)
    return None


def share_left(jobs: Sequence[JobRecord]) -> float:
    """Share of a task's planned rows that may still be trained: those of jobs that have not ended."""
    planned = sum(record.total_steps * record.job.rows_per_update for record in jobs)
    left = sum(
        (record.total_steps - record.step) * record.job.rows_per_update for record in jobs if not record.state.is_end
    )
    return left / planned if planned else 1.0
