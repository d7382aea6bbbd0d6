"""Which jobs of one task hold slots: grouped by batch size, decreasing, while they fit; freed room is filled at once.

The token budget of a joint step is what keeps the GPU full. Memory is kept by construction: `Capacity` says how many
rank rows the slots have and how many tokens a pass holds, and the memory model found both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from alto_core.scheduling.memory_model import MemoryModel, PassSize


@dataclass(frozen=True, kw_only=True)
class JobSize:
    """What a job takes in a joint step."""

    job_id: str
    adapter_batch_size: int
    lora_rank: int
    row_tokens: float
    """Mean length of the task's rows."""
    next_row_tokens: float = 0.0
    """Mean length of the rows of its next step, where that is known: rows of like length pack well."""

    @property
    def step_tokens(self) -> float:
        """Of one micro batch: a pass holds no more of a job at a time."""
        return self.adapter_batch_size * self.row_tokens


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Room for jobs side by side."""

    num_slots: int
    rank_rows: int
    step_tokens: float
    """Token budget of a joint step; one job alone may exceed it."""

    def holds(self, jobs: Iterable[JobSize]) -> bool:
        """Whether these jobs fit side by side."""
        together = tuple(jobs)
        return (
            len(together) <= self.num_slots
            and sum(job.lora_rank for job in together) <= self.rank_rows
            and (len(together) <= 1 or sum(job.step_tokens for job in together) <= self.step_tokens)
        )

    def occupancy(self, jobs: Iterable[JobSize]) -> float:
        """Share of the token budget that these jobs use."""
        return min(1.0, sum(job.step_tokens for job in jobs) / self.step_tokens)


def admission_order(waiting: Iterable[JobSize], freed: JobSize | None = None) -> tuple[JobSize, ...]:
    """Waiting jobs in the order in which they are tried.

    Args:
        waiting: in any order.
        freed: the job that has just left: its batch size comes first, so that the packed step keeps its size, and
            among equals those whose rows are about as long.
    """

    def place(job: JobSize) -> tuple[bool, int, float, int, str]:
        is_other = freed is not None and job.adapter_batch_size != freed.adapter_batch_size
        distance = 0.0 if freed is None else abs(job.next_row_tokens - freed.next_row_tokens)
        return is_other, -job.adapter_batch_size, distance, -job.lora_rank, job.job_id

    return tuple(sorted(waiting, key=place))


def admit(
    waiting: Iterable[JobSize],
    running: Sequence[JobSize],
    capacity: Capacity,
    freed: JobSize | None = None,
    *,
    place: Callable[[JobSize], bool] = lambda _: True,
) -> tuple[JobSize, ...]:
    """The jobs that get a slot now, in their order. One that does not fit is passed over for one that does.

    Args:
        waiting, running: the jobs.
        capacity: room for them.
        freed: the job that has just left.
        place: puts a job that fits into its slot; False when it found no place there.
    """
    together, admitted = list(running), []
    for job in admission_order(waiting, freed):
        if capacity.holds((*together, job)) and place(job):
            together.append(job)
            admitted.append(job)
    return tuple(admitted)


def without(capacity: Capacity, evicted: JobSize, still_running: Sequence[JobSize]) -> Capacity:
    """The room that is left when a job had to go for want of memory: what now runs, so that it is not back at once."""
    tokens = max(sum(job.step_tokens for job in still_running), evicted.step_tokens / 2)
    return dataclasses.replace(
        capacity,
        num_slots=max(1, min(capacity.num_slots, len(still_running))),
        step_tokens=min(capacity.step_tokens, tokens),
    )


@dataclass(frozen=True, kw_only=True)
class PackingPlan:
    """Sizes of slots and passes for one task on one device."""

    capacity: Capacity
    max_pass_tokens: int
    peak_bytes: int
    """Predicted, backbone included."""
    too_large: tuple[str, ...]
    """Ids of jobs that fit in no way."""


def plan_packing(
    model: MemoryModel,
    jobs: Sequence[JobSize],
    *,
    budget_bytes: float,
    pass_tokens: int,
    longest_row: int,
    label_share: float,
    max_slots: int | None = None,
) -> PackingPlan | None:
    """Sizes that train most tokens in a pass within the memory; among equals the smaller pass.

    Args:
        model: of the memory.
        jobs: all jobs of the task.
        budget_bytes: that backbone, slots and one pass may take.
        pass_tokens: of the largest pass that is worth having, a power of two; halved while that makes room for jobs.
        longest_row: tokens; a micro batch is never divided, so it bounds the smallest pass.
        label_share: of the tokens.
        max_slots: upper bound from the task file.

    Returns:
        None: not even the smallest job fits.
    """
    best: tuple[float, int, PackingPlan] | None = None
    fitting = [job for job in jobs if alone_bytes(model, job, longest_row, label_share) <= budget_bytes]
    if not fitting:
        return None
    micro = max(job.adapter_batch_size for job in fitting) * longest_row
    ranks = sorted((job.lora_rank for job in fitting), reverse=True)
    tokens = sorted((job.step_tokens for job in fitting), reverse=True)
    while True:
        size = PassSize(
            tokens=max(pass_tokens, micro),
            labels=round(max(pass_tokens, micro) * label_share),
            lora_rank=ranks[0],
        )
        room = budget_bytes - model.shape.backbone_bytes - model.pass_bytes(size)
        num_slots, rows = 0, 0
        while num_slots < min(len(ranks), max_slots or len(ranks)):
            if model.slot_bytes(rows + ranks[num_slots]) > room:
                break
            rows += ranks[num_slots]
            num_slots += 1
        if num_slots:
            together = sum(tokens[:num_slots])
            plan = PackingPlan(
                capacity=Capacity(num_slots=num_slots, rank_rows=rows, step_tokens=max(together, 1.0)),
                max_pass_tokens=pass_tokens,
                peak_bytes=model.peak_bytes(rank_rows=rows, size=size),
                too_large=tuple(job.job_id for job in jobs if job not in fitting),
            )
            score = (min(pass_tokens, together), -pass_tokens, plan)
            if best is None or score[:2] > best[:2]:
                best = score
        if pass_tokens <= micro:
            break
        pass_tokens = max(pass_tokens // 2, 1)
    # The largest micro batch and the largest adapter may belong to two jobs that fit alone, and not in the same slots.
    return best[2] if best else _one_at_a_time(model, jobs, budget_bytes, longest_row, label_share)


def alone_bytes(model: MemoryModel, job: JobSize, longest_row: int, label_share: float) -> int:
    """Peak with one job whose micro batch holds the longest rows, backbone included."""
    tokens = job.adapter_batch_size * longest_row
    size = PassSize(tokens=tokens, labels=round(tokens * label_share), lora_rank=job.lora_rank)
    return model.peak_bytes(rank_rows=job.lora_rank, size=size)


def _one_at_a_time(
    model: MemoryModel, jobs: Sequence[JobSize], budget_bytes: float, longest_row: int, label_share: float
) -> PackingPlan:
    """A single slot, of the rank with which most jobs fit."""

    def in_slot_of(lora_rank: int) -> list[JobSize]:
        fitting = (job for job in jobs if job.lora_rank <= lora_rank)
        widened = ((job, dataclasses.replace(job, lora_rank=lora_rank)) for job in fitting)
        return [job for job, wide in widened if alone_bytes(model, wide, longest_row, label_share) <= budget_bytes]

    rank = max({job.lora_rank for job in jobs}, key=lambda lora_rank: (len(in_slot_of(lora_rank)), -lora_rank))
    kept = in_slot_of(rank)
    largest = dataclasses.replace(max(kept, key=lambda job: job.adapter_batch_size), lora_rank=rank)
    return PackingPlan(
        capacity=Capacity(num_slots=1, rank_rows=rank, step_tokens=max(1.0, largest.step_tokens)),
        max_pass_tokens=largest.adapter_batch_size * longest_row,
        peak_bytes=alone_bytes(model, largest, longest_row, label_share),
        too_large=tuple(job.job_id for job in jobs if job not in kept),
    )
