"""One joint step: rows of many jobs in one packed forward and backward, then one AdamW update of each job.

A job's loss is the sum of its token losses over all rows of the update, divided by the number of trained tokens of all
these rows. So gradient accumulation gives what one large batch gives, and neither other jobs nor the cut into micro
batches changes a job's gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from alto_core.data.packing import pack_rows
from alto_core.data.rows import TokenRow
from alto_core.domain import StepRecord
from alto_core.engine.active_job import ActiveJob
from alto_core.engine.backbone import Backbone
from alto_core.engine.lora_linear import LoraRouting
from alto_core.engine.losses import row_loss_sums, token_losses
from alto_core.engine.optimizer import adamw_update, gradient_norm, learning_rate
from kernels.segments import make_segments

_Part = tuple[int, Sequence[TokenRow]]
"""Number of the job in the step, and its rows of one micro step."""


def train_step(
    backbone: Backbone,
    routing: LoraRouting,
    jobs: Sequence[ActiveJob],
    rows: Sequence[Sequence[TokenRow]],
    *,
    max_pass_tokens: int,
) -> tuple[StepRecord, ...]:
    """Make one update of each job.

    Args:
        backbone: with the jobs' layers attached.
        routing: of these layers.
        jobs: distinct.
        rows: for each job the rows of its update, cut here into micro batches of its adapter batch size.
        max_pass_tokens: of one forward and backward; a micro batch with more gets a pass of its own.

    Returns:
        One record per job. A job whose loss or gradient is not finite is not updated; its record shows it.

    Raises:
        ValueError: a job has no rows, or no trained token in them.
    """
    labels = [sum(row.num_labels for row in job_rows) for job_rows in rows]
    for active, count in zip(jobs, labels, strict=True):
        if count == 0:
            raise ValueError(f"{active.job.job_id}: expected rows with trained tokens, but got none")
        active.block.grads_rW.zero_()
    loss_sums = [0.0] * len(jobs)
    for micro_step, all_parts in enumerate(_micro_steps(jobs, rows)):
        for parts in _passes(all_parts, max_pass_tokens):
            for job_number, loss_sum in _accumulate(backbone, routing, jobs, labels, parts, micro_step):
                loss_sums[job_number] += loss_sum
    return tuple(
        _finish(active, loss_sum / count, _num_tokens(job_rows))
        for active, loss_sum, count, job_rows in zip(jobs, loss_sums, labels, rows, strict=True)
    )


def _micro_steps(jobs: Sequence[ActiveJob], rows: Sequence[Sequence[TokenRow]]) -> Iterator[list[_Part]]:
    """The k-th micro batch of every job that has one, for each k."""
    cut = [_cut(job_rows, active.job.adapter_batch_size) for active, job_rows in zip(jobs, rows, strict=True)]
    for parts in itertools.zip_longest(*cut, fillvalue=()):
        yield [(number, part) for number, part in enumerate(parts) if part]


def _passes(parts: Sequence[_Part], max_tokens: int) -> Iterator[list[_Part]]:
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


@torch.enable_grad()
def _accumulate(
    backbone: Backbone,
    routing: LoraRouting,
    jobs: Sequence[ActiveJob],
    labels: Sequence[int],
    parts: Sequence[_Part],
    micro_step: int,
) -> list[tuple[int, float]]:
    """Forward and backward of one pass; gives the job's number and the sum of token losses of each row."""
    batch = pack_rows([part for _, part in parts], backbone.device)
    if len(batch.label_ids_P) == 0:
        return []
    taking_part = [jobs[number] for number, _ in parts]
    tokens = [_num_tokens(part) for _, part in parts]
    segments = make_segments(
        [active.training_segment(count, micro_step) for active, count in zip(taking_part, tokens, strict=True)],
        backbone.device,
    )
    with routing.use(segments, [active.layer_indices for active in taking_part]):
        losses_P = token_losses(backbone, batch)
    weights_N = torch.tensor([1.0 / labels[parts[slot][0]] for slot in batch.row_slots], device=backbone.device)
    # A weighted sum passes each token a gradient of its own weight, whatever the other losses are: a NaN stays alone.
    (losses_P * weights_N[batch.label_rows_P]).sum().backward()
    row_sums = row_loss_sums(losses_P, batch)
    return [(parts[slot][0], row_sum) for slot, row_sum in zip(batch.row_slots, row_sums, strict=True)]


def _finish(active: ActiveJob, train_loss: float, num_tokens: int) -> StepRecord:
    """Update one job from its gradient, and count the step."""
    assert active.budget is not None, "an adapter loaded for inference is not trained"
    step, job = active.step + 1, active.job
    rate, norm = learning_rate(job, active.budget, step), gradient_norm(active.block)
    if math.isfinite(train_loss) and math.isfinite(norm):
        adamw_update(
            active.block,
            step=step,
            rate=rate,
            weight_decay=job.weight_decay,
            grad_norm=norm,
            max_grad_norm=job.max_grad_norm,
        )
    active.step = step
    return StepRecord(
        job_id=job.job_id, step=step, train_loss=train_loss, learning_rate=rate, grad_norm=norm, num_tokens=num_tokens
    )
