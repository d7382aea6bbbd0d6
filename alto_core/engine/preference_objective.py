"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290) with its relatives, many jobs to a pass.

    margin = (log p(chosen) - log r(chosen)) - (log p(rejected) - log r(rejected))

p is the adapter's and r the reference's probability of an answer after the prompt, both fixed numbers per pair but p.
A job's loss is the mean over its pairs of

    sigmoid   -(1 - e) log sigmoid(beta margin) - e log sigmoid(-beta margin)     e: label smoothing
    hinge     max(0, 1 - beta margin)
    ipo       (margin - 1 / (2 beta))^2

and with an SFT term, of `sft_weight` times the negative log-likelihood per token of the chosen answers. With lengths
normalised a log-probability is one per token of its answer.

Shape suffixes: P labels, M pairs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from alto_core.data.packing import PackedBatch
from alto_core.data.rows import PairRow, TokenRow
from alto_core.domain import LoraJob, RowLosses
from alto_core.engine.backbone import Backbone
from alto_core.engine.losses import token_losses
from alto_core.engine.objective import JobPart, LabelFields, Measured, Reference, TokenObjective
from alto_core.engine.packed_attention import PackedRows, RaggedRows
from alto_core.engine.pass_inputs import NOBODY, PairFields, PassInputs
from alto_core.errors import EngineError
from alto_core.preference import PairLosses, PreferenceOptions

TIE = 1e-3
"""Nats: smaller margins are rounding, as before the first update."""


class PreferenceObjective:
    """The objective of an engine whose training rows are pairs.

    Args:
        options: of the task.
        reference: of every pair that is trained or evaluated; may be filled later.
        beta: of the untuned model, for its losses.
        starts_untuned: the reference is the backbone alone, so the untuned model's margins are 0.
    """

    def __init__(self, options: PreferenceOptions, reference: Reference, *, beta: float, starts_untuned: bool = True):
        self._options, self._reference, self._beta, self._starts_untuned = options, reference, beta, starts_untuned

    @property
    def measures(self) -> tuple[str, ...]:
        return ("train_accuracy", "train_margin", "train_chosen_reward", "train_rejected_reward")

    def num_units(self, rows: Sequence[TokenRow]) -> int:
        return len(rows)

    def fields(self, batch: PackedBatch, parts: Sequence[JobPart]) -> LabelFields:
        num_labels = len(batch.label_ids_P)
        return LabelFields(
            label_weights_P=np.zeros(num_labels, np.float32),
            label_slots_P=np.full(num_labels, NOBODY, np.int32),
            pairs=self._pair_fields(parts),
        )

    def measure(self, backbone: Backbone, inputs: PassInputs, rows: PackedRows | RaggedRows) -> Measured:
        losses_P, pairs = token_losses(backbone, inputs, rows), inputs.pairs
        # In float64, where the order in which a device adds does not show; the last place is for filled up labels.
        num_pairs = len(pairs.pair_weights_M)
        sums = torch.zeros(2 * num_pairs + 1, dtype=torch.float64, device=losses_P.device)
        sums = sums.index_add(0, inputs.label_rows_P, losses_P.double())[:-1]
        chosen_M, rejected_M = (-sums).view(-1, 2).unbind(1)
        chosen_gain_M = (chosen_M - pairs.chosen_references_M) * pairs.chosen_scales_M
        rejected_gain_M = (rejected_M - pairs.rejected_references_M) * pairs.rejected_scales_M
        margin_M = chosen_gain_M - rejected_gain_M
        weights_M, betas_M = pairs.pair_weights_M, pairs.pair_betas_M
        loss_M = pair_loss(margin_M, betas_M, self._options) * weights_M - chosen_M * pairs.pair_sft_weights_M
        # Masked, not multiplied by 0: a pair that fills up the pass has no part in it.
        objective = torch.where(weights_M == 0, 0.0, loss_M).sum()
        with torch.no_grad():
            rewards = (margin_M, chosen_gain_M, rejected_gain_M)
            shares = (preferred(margin_M) * weights_M, *(reward_M * betas_M * weights_M for reward_M in rewards))
        return Measured(
            objective=objective.float(),
            losses_P=losses_P.detach(),
            shares_QU=(loss_M.detach(), *shares),
            slots_U=pairs.pair_slots_M,
        )

    def row_losses(self, job: LoraJob | None, rows: Sequence[TokenRow], sums_R2: NDArray[np.float64]) -> RowLosses:
        pairs = [row for row in rows if isinstance(row, PairRow)]
        if len(pairs) < len(rows):
            return TokenObjective().row_losses(job, rows, sums_R2)
        reference_R2 = np.array([self._of(row) for row in pairs]).reshape(-1, 2)
        if job is None and self._starts_untuned:
            sums_R2 = reference_R2  # to the last digit, which another packing of the pass may change
        chosen, rejected, *reference = (
            RowLosses(loss_sums=tuple(sums.tolist()), num_labels=labels)
            for both_R2 in (sums_R2, reference_R2)
            for sums, labels in zip(both_R2.T, _labels_of_sides(pairs), strict=True)
        )
        losses = PairLosses(
            loss_sums=(0.0,) * len(pairs),
            num_labels=(1,) * len(pairs),
            chosen=chosen,
            rejected=rejected,
            reference=(reference[0], reference[1]),
            beta=self._beta if job is None or job.beta is None else job.beta,
            length_normalised=self._options.length_normalised,
        )
        return _judged(losses, self._options)

    def _pair_fields(self, parts: Sequence[JobPart]) -> PairFields[NDArray[Any]]:
        pairs = [row for part in parts for row in part.rows]
        assert all(isinstance(row, PairRow) for row in pairs), "an objective over pairs trains on nothing else"
        counts = [len(part.rows) for part in parts]
        chosen, rejected = (np.array(labels, np.float32) for labels in _labels_of_sides(pairs))
        references_M2 = -np.array([self._of(row) for row in pairs], np.float32).reshape(-1, 2)
        normalises = self._options.length_normalised

        def by_job(values: Sequence[float], dtype: type[np.generic] = np.float32) -> NDArray[Any]:
            return np.repeat(np.array(values, dtype), counts)

        return PairFields(
            pair_weights_M=by_job([1 / len(part.update) for part in parts]),
            pair_betas_M=by_job([self._beta_of(part.job) for part in parts]),
            chosen_references_M=references_M2[:, 0],
            rejected_references_M=references_M2[:, 1],
            chosen_scales_M=1 / chosen if normalises else np.ones_like(chosen),
            rejected_scales_M=1 / rejected if normalises else np.ones_like(rejected),
            pair_sft_weights_M=by_job(
                [self._options.sft_weight / sum(_labels_of_sides(part.update)[0]) for part in parts]
            ),
            pair_slots_M=by_job([part.slot for part in parts], np.int32),
        )

    def _beta_of(self, job: LoraJob) -> float:
        return self._beta if job.beta is None else job.beta

    def _of(self, row: TokenRow) -> tuple[float, float]:
        try:
            return self._reference[row.row_id]
        except KeyError:
            raise EngineError(
                f"{row.origin}: the reference's log-probabilities are not there. Measure them before training."
            ) from None


def pair_loss(margin_M: Tensor, betas_M: Tensor, options: PreferenceOptions) -> Tensor:
    """Loss of each pair without the SFT term; differentiable."""
    match options.loss:
        case "hinge":
            return torch.relu(1 - betas_M * margin_M)
        case "ipo":
            return (margin_M - 1 / (2 * betas_M)).square()
    scaled_M, smoothing = betas_M * margin_M, options.label_smoothing
    loss_M = -(1 - smoothing) * functional.logsigmoid(scaled_M)
    return loss_M - smoothing * functional.logsigmoid(-scaled_M) if smoothing else loss_M


def preferred(margin_M: Tensor) -> Tensor:
    """1 where the chosen answer gained more than the rejected one, 0.5 where both gained the same; else 0, or NaN."""
    return (torch.where(margin_M.abs() < TIE, 0.0, margin_M).sign() + 1) / 2


def _judged(losses: PairLosses, options: PreferenceOptions) -> PairLosses:
    """The same with `loss_sums` made from the sides' losses."""
    chosen, rejected, *reference = (torch.tensor(side.loss_sums, dtype=torch.float64) for side in losses.compared())
    margin = (reference[0] - chosen) - (reference[1] - rejected)
    values = pair_loss(margin, torch.full_like(margin, losses.beta), options)
    if options.sft_weight:
        # As in training: per token over all rows, brought to a mean over pairs.
        sums = torch.tensor(losses.chosen.loss_sums, dtype=torch.float64)
        values = values + options.sft_weight * sums * len(sums) / sum(losses.chosen.num_labels)
    return dataclasses.replace(losses, loss_sums=tuple(values.tolist()))


def _labels_of_sides(rows: Sequence[TokenRow]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Trained tokens of the chosen answers, and of the rejected ones."""
    pairs = [row for row in rows if isinstance(row, PairRow)]
    chosen = tuple(row.num_chosen_labels for row in pairs)
    return chosen, tuple(row.num_labels - count for row, count in zip(pairs, chosen, strict=True))
