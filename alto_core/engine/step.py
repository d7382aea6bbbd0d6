"""One joint step: rows of many jobs in one packed forward and backward, then one AdamW update of each job.

A job's loss is the sum of its token losses over all rows of the update, divided by the number of trained tokens of all
these rows. So gradient accumulation gives what one large batch gives, and neither other jobs nor the cut into micro
batches changes a job's gradient.

A step that runs out of memory has changed no job: all that it allocates comes before the first write to one. The same
step can be made again, in smaller passes.

On Triton kernels nobody waits for a step: losses and norms stay on the device until `take_records`.

Shape suffixes: P labels, J slots.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from alto_core.data.packing import pack_rows
from alto_core.data.rows import TokenRow
from alto_core.domain import StepRecord
from alto_core.engine.active_job import ActiveJob
from alto_core.engine.joint_adamw import JointAdamW, Update
from alto_core.engine.optimizer import adamw_update, gradient_norm, learning_rate
from alto_core.engine.passes import PassKind, PassRunner, PassWork

MAX_PENDING = 512
"""Steps whose losses may wait on the device."""

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
        labels = [sum(row.num_labels for row in job_rows) for job_rows in rows]
        for active, count in zip(jobs, labels, strict=True):
            if count == 0:
                raise ValueError(f"{active.job.job_id}: expected rows with trained tokens, but got none")
        updates = [_next_update(active) for active in jobs]
        if self._optimizer is not None:
            self._optimizer.prepare(updates)
        self._runner.losses_J.zero_()
        measured_2J = torch.empty((2, *self._runner.losses_J.shape), device=self._runner.losses_J.device)
        passes = list(self._passes(jobs, rows, labels))
        if self._optimizer is not None and len(passes) == 1:
            self._runner.run(PassKind.UPDATE, passes[0])
        else:
            for active in jobs:
                active.block.grads_rW.zero_()
            for work in passes:
                self._runner.run(PassKind.GRADIENTS, work)
            self._update(updates)
        torch.stack((self._runner.losses_J, self._runner.norms_J), out=measured_2J)
        self._note(updates, [_num_tokens(job_rows) for job_rows in rows], measured_2J)

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
        norms = [gradient_norm(update.active.block) for update in updates]
        scratch_W = torch.empty_like(updates[0].active.block.params_rW[0])
        for update, norm in zip(updates, norms, strict=True):
            active = update.active
            norms_J[active.block.slot] = norm
            if math.isfinite(losses[active.block.slot]) and math.isfinite(norm):
                adamw_update(
                    active.block,
                    step=update.step,
                    rate=update.learning_rate,
                    weight_decay=active.job.weight_decay,
                    grad_norm=norm,
                    max_grad_norm=active.job.max_grad_norm,
                    scratch_W=scratch_W,
                )

    def _note(self, updates: Sequence[Update], num_tokens: Sequence[int], measured_2J: Tensor) -> None:
        for update in updates:
            update.active.step = update.step
        slots = tuple(update.active.block.slot for update in updates)
        self._pending.append(_PendingStep(tuple(updates), slots, tuple(num_tokens), measured_2J))
        if len(self._pending) >= MAX_PENDING:
            self._settle()

    def _settle(self) -> None:
        """Read what pending steps measured."""
        if not self._pending:
            return
        measured = torch.stack([step.measured_2J for step in self._pending]).tolist()
        for step, (losses, norms) in zip(self._pending, measured, strict=True):
            for update, slot, num_tokens in zip(step.updates, step.slots, step.num_tokens, strict=True):
                self._records.append(
                    StepRecord(
                        job_id=update.active.job.job_id,
                        step=update.step,
                        train_loss=losses[slot],
                        learning_rate=update.learning_rate,
                        grad_norm=norms[slot],
                        num_tokens=num_tokens,
                    )
                )
        self._pending.clear()

    def _passes(
        self, jobs: Sequence[ActiveJob], rows: Sequence[Sequence[TokenRow]], labels: Sequence[int]
    ) -> Iterator[PassWork]:
        for micro_step, all_parts in enumerate(_micro_steps(jobs, rows)):
            for parts in _fitting(all_parts, self.max_pass_tokens):
                work = _work(jobs, labels, parts, micro_step)
                if len(work.batch.label_ids_P):
                    yield work


@dataclass(frozen=True)
class _PendingStep:
    updates: tuple[Update, ...]
    slots: tuple[int, ...]
    num_tokens: tuple[int, ...]
    measured_2J: Tensor
    """Losses and gradient norms by slot, on the device."""


def _next_update(active: ActiveJob) -> Update:
    assert active.budget is not None, "an adapter loaded for inference is not trained"
    step = active.step + 1
    return Update(active=active, step=step, learning_rate=learning_rate(active.job, active.budget, step))


def _micro_steps(jobs: Sequence[ActiveJob], rows: Sequence[Sequence[TokenRow]]) -> Iterator[list[_Part]]:
    """The k-th micro batch of every job that has one, for each k."""
    cut = [_cut(job_rows, active.job.adapter_batch_size) for active, job_rows in zip(jobs, rows, strict=True)]
    for parts in itertools.zip_longest(*cut, fillvalue=()):
        yield [(number, part) for number, part in enumerate(parts) if part]


def _fitting(parts: Sequence[_Part], max_tokens: int) -> Iterator[list[_Part]]:
    """Neighbouring parts together, as many as stay within the tokens of a pass."""
    current: list[_Part] = []
    for part in parts:
        if current and sum(_num_tokens(rows) for _, rows in (*current, part)) > max_tokens:
            yield current
            current = []
        current.append(part)
    yield current


def _num_tokens(rows: Sequence[TokenRow]) -> int:
    return sum(len(row.token_ids) for row in rows)


def _cut(rows: Sequence[TokenRow], size: int) -> list[Sequence[TokenRow]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _work(jobs: Sequence[ActiveJob], labels: Sequence[int], parts: Sequence[_Part], micro_step: int) -> PassWork:
    batch = pack_rows([part for _, part in parts])
    taking_part = [jobs[number] for number, _ in parts]
    weights = np.array([1.0 / labels[number] for number, _ in parts], dtype=np.float32)
    slots = np.array([active.block.slot for active in taking_part], dtype=np.int32)
    part_of_label_P = np.array(batch.row_slots)[batch.label_rows_P]
    return PassWork(
        batch=batch,
        specs=tuple(
            active.training_segment(_num_tokens(rows), micro_step)
            for active, (_, rows) in zip(taking_part, parts, strict=True)
        ),
        layers_by_segment=tuple(active.layer_indices for active in taking_part),
        label_weights_P=weights[part_of_label_P],
        label_slots_P=slots[part_of_label_P],
    )
