"""One joint step: rows of many jobs in one packed forward and backward, then one AdamW update of each job.

A job's loss is a sum over all rows of the update, divided by the number of units of all these rows: trained tokens, or
whatever the engine's objective is a mean of. So gradient accumulation gives what one large batch gives, and neither
other jobs nor the cut into micro batches changes a job's gradient.

A step that runs out of memory has changed no job: all that it allocates comes before the first write to one. The same
step can be made again, in smaller passes.

On Triton kernels nobody waits for a step: losses and norms stay on the device until `take_records`.

Shape suffixes: Q measured quantities, J slots.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from alto_core.data.packing import pack_rows, packed_tokens
from alto_core.data.rows import TokenRow
from alto_core.domain import StepRecord
from alto_core.engine.active_job import ActiveJob
from alto_core.engine.capture_choice import PassKind
from alto_core.engine.joint_adamw import JointAdamW, Update
from alto_core.engine.objective import JobPart
from alto_core.engine.optimizer import adamw_update, gradient_norm, learning_rate
from alto_core.engine.passes import PassRunner, PassWork

MAX_PENDING = 512
"""Steps whose losses may wait on the device."""

Row = TypeVar("Row")
_Part = tuple[int, Sequence[TokenRow]]
"""Number of the job in the step, and its rows of one micro step."""


class JointStepper:
    """Makes joint steps and keeps their records until someone takes them.

    Args:
        runner: of the engine.
        optimizer: the joint one; None updates the jobs one by one, and waits for each step.
        max_pass_tokens: of one forward and backward; a micro batch with more gets a pass of its own.
    """

    def __init__(self, runner: PassRunner, optimizer: JointAdamW | None, *, max_pass_tokens: int):
        self._runner, self._optimizer, self.max_pass_tokens = runner, optimizer, max_pass_tokens
        self._pending: list[_PendingStep] = []
        self._records: list[StepRecord] = []

    def step(self, jobs: Sequence[ActiveJob], rows: Sequence[Sequence[TokenRow]]) -> None:
        """Make one update of each job.

        Args:
            jobs: distinct.
            rows: for each job the rows of its update, cut here into micro batches of its adapter batch size.

        Raises:
            ValueError: a job has no rows, or no trained token in them.
        """
        for active, job_rows in zip(jobs, rows, strict=True):
            if not any(row.num_labels for row in job_rows):
                raise ValueError(f"{active.job.job_id}: expected rows with trained tokens, but got none")
        updates = [_next_update(active) for active in jobs]
        if self._optimizer is not None:
            self._optimizer.prepare(updates)
        totals_QJ = self._runner.measured_QJ
        totals_QJ.zero_()
        measured_QJ = totals_QJ.new_empty((len(totals_QJ) + 1, totals_QJ.shape[1]))
        passes = list(self._passes(jobs, rows))
        if self._optimizer is not None and len(passes) == 1:
            self._runner.run(PassKind.UPDATE, passes[0])
        else:
            for active in jobs:
                active.block.grads_rW.zero_()
            for work in passes:
                self._runner.run(PassKind.GRADIENTS, work)
            self._update(updates)
        torch.stack((*totals_QJ, self._runner.norms_J), out=measured_QJ)
        self._note(updates, [self._num_tokens(job_rows) for job_rows in rows], measured_QJ)

    def take_records(self) -> tuple[StepRecord, ...]:
        """Records of all steps since the last call, in their order. Waits for the device.

        A job whose loss or gradient is not finite was not updated; its record shows it.
        """
        self._settle()
        records, self._records = tuple(self._records), []
        return records

    def _update(self, updates: Sequence[Update]) -> None:
        losses_J, norms_J = self._runner.losses_J, self._runner.norms_J
        if self._optimizer is not None:
            norms_J.copy_(self._optimizer.update(losses_J))
            return
        losses = losses_J.tolist()
        norms = [gradient_norm(update.active.trained_block, update.active.side_ratios_W) for update in updates]
        scratch_W = torch.empty_like(updates[0].active.block.params_rW[0])
        for update, norm in zip(updates, norms, strict=True):
            active = update.active
            norms_J[active.block.slot] = norm
            if math.isfinite(losses[active.block.slot]) and math.isfinite(norm):
                adamw_update(
                    active.trained_block,
                    step=update.step,
                    rate=update.learning_rate,
                    weight_decay=active.job.weight_decay,
                    grad_norm=norm,
                    max_grad_norm=active.job.max_grad_norm,
                    scratch_W=scratch_W,
                    side_ratios_W=active.side_ratios_W,
                )

    def _note(self, updates: Sequence[Update], num_tokens: Sequence[int], measured_QJ: Tensor) -> None:
        for update in updates:
            update.active.step = update.step
        slots = tuple(update.active.block.slot for update in updates)
        self._pending.append(_PendingStep(tuple(updates), slots, tuple(num_tokens), measured_QJ))
        if len(self._pending) >= MAX_PENDING:
            self._settle()

    def _settle(self) -> None:
        """Read what pending steps measured."""
        if not self._pending:
            return
        names = self._runner.objective.measures
        measured = torch.stack([step.measured_QJ for step in self._pending]).tolist()
        for step, (losses, *measures, norms) in zip(self._pending, measured, strict=True):
            for update, slot, num_tokens in zip(step.updates, step.slots, step.num_tokens, strict=True):
                self._records.append(
                    StepRecord(
                        job_id=update.active.job.job_id,
                        step=update.step,
                        train_loss=losses[slot],
                        learning_rate=update.learning_rate,
                        grad_norm=norms[slot],
                        num_tokens=num_tokens,
                        measures={name: values[slot] for name, values in zip(names, measures, strict=True)},
                    )
                )
        self._pending.clear()

    def _passes(self, jobs: Sequence[ActiveJob], rows: Sequence[Sequence[TokenRow]]) -> Iterator[PassWork]:
        batch_sizes = [active.job.adapter_batch_size for active in jobs]
        for micro_step, all_parts in enumerate(micro_steps(batch_sizes, rows)):
            sizes = [self._num_tokens(rows_of_part) for _, rows_of_part in all_parts]
            for together in even_passes(sizes, self.max_pass_tokens):
                parts = [all_parts[i] for i in together]
                work = self._work(jobs, rows, parts, micro_step)
                if len(work.batch.label_ids_P):
                    yield work

    def _num_tokens(self, rows: Sequence[TokenRow]) -> int:
        return sum(packed_tokens(row, share_prompts=self._runner.share_prompts) for row in rows)

    def _work(
        self,
        jobs: Sequence[ActiveJob],
        rows: Sequence[Sequence[TokenRow]],
        parts: Sequence[_Part],
        micro_step: int,
    ) -> PassWork:
        batch = pack_rows([part for _, part in parts], share_prompts=self._runner.share_prompts)
        taking_part = [jobs[number] for number, _ in parts]
        shares = [
            JobPart(job=active.job, slot=active.block.slot, rows=part, update=rows[number])
            for active, (number, part) in zip(taking_part, parts, strict=True)
        ]
        return PassWork(
            batch=batch,
            specs=tuple(
                active.training_segment(self._num_tokens(part), micro_step)
                for active, (_, part) in zip(taking_part, parts, strict=True)
            ),
            layers_by_segment=tuple(active.layer_indices for active in taking_part),
            fields=self._runner.objective.fields(batch, shares),
            lowest_layer=min(active.lowest_layer for active in taking_part),
        )


def micro_steps(batch_sizes: Sequence[int], rows: Sequence[Sequence[Row]]) -> Iterator[list[tuple[int, Sequence[Row]]]]:
    """The k-th micro batch of every job that has one, for each k.

    Args:
        batch_sizes: rows of each job's micro batch.
        rows: of each job's update.

    Yields:
        The number of each job that has one, with its rows.
    """
    cut = [
        [job_rows[start : start + size] for start in range(0, len(job_rows), size)]
        for size, job_rows in zip(batch_sizes, rows, strict=True)
    ]
    for parts in itertools.zip_longest(*cut, fillvalue=()):
        yield [(number, part) for number, part in enumerate(parts) if part]


def even_passes(sizes: Sequence[int], max_tokens: int) -> Iterator[range]:
    """Neighbouring parts together within the tokens of a pass, in few passes of about the same size.

    Passes of one size share a captured graph; full ones and a rest that varies from step to step need many.

    Args:
        sizes: tokens of the parts; a part that is larger than a pass gets one of its own.
        max_tokens: of a pass.

    Yields:
        The numbers of the parts of each pass.
    """
    first, together, left = 0, 0, sum(sizes)
    for number, size in enumerate(sizes):
        share = left / max(1, math.ceil(left / max_tokens))
        if number > first and (together + size > max_tokens or together + size / 2 > share):
            yield range(first, number)
            first, left, together = number, left - together, 0
        together += size
    if first < len(sizes):
        yield range(first, len(sizes))


@dataclass(frozen=True)
class _PendingStep:
    updates: tuple[Update, ...]
    slots: tuple[int, ...]
    num_tokens: tuple[int, ...]
    measured_QJ: Tensor
    """Losses, measures and gradient norms by slot, on the device."""


def _next_update(active: ActiveJob) -> Update:
    assert active.budget is not None, "an adapter loaded for inference is not trained"
    step = active.step + 1
    return Update(active=active, step=step, learning_rate=learning_rate(active.job, active.budget, step))
