"""Jobs played through slots: who trains beside whom, for how many steps, until the last one has ended.

Jobs are admitted and backfilled by the code that admits them when they train. Only where in the slots a job lies, and
the rows of its next step, are not played.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from alto_core.scheduling.intra_task import Capacity, JobSize, admit


@dataclass(frozen=True, kw_only=True)
class JobWork:
    """A stretch of a job's training."""

    size: JobSize
    last_step: int
    """The stretch ends after this update, with an evaluation."""
    first_step: int = 0
    """Updates made before."""
    eval_steps: tuple[int, ...] = ()
    """Updates after which the job is evaluated, rising; those outside of the stretch do not count."""

    @property
    def job_id(self) -> str:
        return self.size.job_id

    def next_mark(self, step: int) -> int:
        """The next update after which the job is evaluated or ends."""
        number = bisect.bisect_right(self.eval_steps, step)
        return min([*self.eval_steps[number : number + 1], self.last_step])


@dataclass(frozen=True, kw_only=True)
class Round:
    """Joint steps of the same jobs, up to the next evaluation."""

    steps_made: Mapping[str, int]
    """Updates of each job in a slot before the round, by job id."""
    num_steps: int
    due: tuple[str, ...]
    """Ids of the jobs that are evaluated after it."""
    admitted: tuple[str, ...]
    """Ids of the jobs that got their slots for it."""
    leaving: tuple[str, ...]
    """Ids of the jobs that leave after it."""
    num_waiting: int
    occupancy: float
    """Share of the token budget in use."""


def play(works: Sequence[JobWork], capacity: Capacity) -> Iterator[Round]:
    """Rounds until every job has ended. Jobs that fit in no way are left out.

    Args:
        works: of distinct jobs, each with at least one step.
        capacity: room for jobs side by side.
    """
    by_id = {work.job_id: work for work in works}
    waiting = {work.job_id: work.size for work in works}
    steps: dict[str, int] = {}

    def fill(freed: JobSize | None) -> list[str]:
        sizes = admit(waiting.values(), [by_id[job_id].size for job_id in steps], capacity, freed)
        for size in sizes:
            del waiting[size.job_id]
            steps[size.job_id] = by_id[size.job_id].first_step
        return [size.job_id for size in sizes]

    admitted = fill(None)
    while steps:
        made = dict(steps)
        num_steps = min(by_id[job_id].next_mark(step) - step for job_id, step in made.items())
        steps = {job_id: step + num_steps for job_id, step in made.items()}
        leaving = tuple(job_id for job_id, step in steps.items() if step == by_id[job_id].last_step)
        yield Round(
            steps_made=made,
            num_steps=num_steps,
            due=tuple(job_id for job_id in made if by_id[job_id].next_mark(made[job_id]) == steps[job_id]),
            admitted=tuple(admitted),
            leaving=leaving,
            num_waiting=len(waiting),
            occupancy=capacity.occupancy(by_id[job_id].size for job_id in made),
        )
        admitted = []
        for job_id in leaving:
            del steps[job_id]
            admitted += fill(by_id[job_id].size)
