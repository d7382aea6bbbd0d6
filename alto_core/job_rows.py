"""The training rows that a job takes at each of its steps, and how many tokens they are."""

from __future__ import annotations

from collections.abc import Sequence

from alto_core.budget import rows_of_step
from alto_core.data.rows import TokenRow
from alto_core.domain import LoraJob
from alto_core.scheduling.intra_task import JobSize


class JobRows:
    """Of one task.

    Args:
        rows: all training rows.
        seed: of their order; the same for all jobs, so equal batch sizes mean equal batches.
    """

    def __init__(self, rows: Sequence[TokenRow], seed: int):
        self._rows, self._seed = rows, seed
        self._mean_tokens = sum(len(row.token_ids) for row in rows) / len(rows)

    def numbers(self, job: LoraJob, steps_made: int) -> tuple[int, ...]:
        """Of the rows of the step that follows so many."""
        return rows_of_step(
            step=steps_made + 1,
            num_train_rows=len(self._rows),
            rows_per_update=job.rows_per_update,
            seed=self._seed,
        )

    def of_step(self, job: LoraJob, steps_made: int) -> tuple[TokenRow, ...]:
        """Rows of the step that follows so many."""
        return tuple(self._rows[i] for i in self.numbers(job, steps_made))

    def size(self, job: LoraJob, steps_made: int) -> JobSize:
        """The room that the job takes among others, with the rows of its next step."""
        next_rows = self.of_step(job, steps_made)
        return JobSize(
            job_id=job.job_id,
            adapter_batch_size=job.adapter_batch_size,
            lora_rank=job.rank_rows,
            row_tokens=self._mean_tokens,
            next_row_tokens=sum(len(row.token_ids) for row in next_rows) / len(next_rows),
        )

    def largest_micro_batch(self, job: LoraJob, steps_made: int) -> int:
        """Tokens of the largest micro batch of the next step, which no pass divides."""
        size = job.adapter_batch_size
        lengths = [len(row.token_ids) for row in self.of_step(job, steps_made)]
        return max(sum(lengths[start : start + size]) for start in range(0, len(lengths), size))
