"""What early exit is expected to save of a task's training: learned from finished tasks of the same preset."""

from __future__ import annotations

from alto_core.domain import TaskState
from alto_core.scheduling.prediction import expected_savings
from alto_core.store import Store

MAX_TASKS = 50
"""Finished tasks that are learned from, the newest."""


def savings_of(preset: str, store: Store) -> float:
    """Share of a task's training rows, in [0, 1], that a preset of early exit will save."""
    return expected_savings(preset, past_savings(preset, store))


def past_savings(preset: str, store: Store) -> tuple[float, ...]:
    """Share of the training rows that each finished task of a preset saved, the newest tasks first."""
    savings: list[float] = []
    for record in store.tasks():
        if record.state is TaskState.FINISHED and record.task.early_exit.preset == preset:
            jobs = store.jobs(record.task_id)
            planned = sum(job.total_steps * job.job.rows_per_update for job in jobs)
            trained = sum(job.step * job.job.rows_per_update for job in jobs)
            savings.append(1 - trained / planned if planned else 0.0)
        if len(savings) == MAX_TASKS:
            break
    return tuple(savings)
