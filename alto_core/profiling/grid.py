"""The packings that the profile stage measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

from alto_core.data.rows import TokenRow
from alto_core.domain import LoraJob

Packing: TypeAlias = tuple[list[LoraJob], list[list[TokenRow]]]
"""Distinct jobs, and a micro batch of rows for each."""


def grid_of(jobs: Sequence[LoraJob], rows: Sequence[TokenRow], max_jobs: int, max_tokens: int) -> list[Packing]:
    """Packings over (jobs, adapter_batch_size, length): the corners of the task's own range, far ones first."""
    by_length = sorted((row for row in rows if row.num_labels), key=lambda row: len(row.token_ids))
    largest = max(jobs, key=lambda job: (job.adapter_batch_size, job.lora_rank))
    smallest = min(jobs, key=lambda job: (job.adapter_batch_size, job.lora_rank))
    long = [len(row.token_ids) for row in by_length[-largest.adapter_batch_size :]]
    most = max_tokens * len(long) // (sum(long) * largest.adapter_batch_size)
    many = min(max_jobs, len(jobs), max(2, most))
    corners = dict.fromkeys(
        (count, job, part)
        for count, part, job in (
            (1, "short", smallest),
            (many, "long", largest),
            (many, "short", largest),
            (1, "long", largest),
            (many, "short", smallest),
            (1, "long", smallest),
        )
    )
    packings = []
    for count, job, part in corners:
        needed = count * job.adapter_batch_size
        pool = by_length[-needed:] if part == "long" else by_length[len(by_length) // 4 :][:needed]
        filled = [pool[i % len(pool)] for i in range(needed)]
        size = job.adapter_batch_size
        packings.append(
            (
                [dataclasses.replace(job, gradient_accumulation=1, seed=seed) for seed in range(count)],
                [filled[i * size : (i + 1) * size] for i in range(count)],
            )
        )
    return packings


def num_tokens(packing: Packing) -> int:
    return sum(len(row.token_ids) for part in packing[1] for row in part)
