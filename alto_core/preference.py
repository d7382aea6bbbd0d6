"""Preference objectives as values: their options, and what an adapter makes of pairs of answers.

How a pair's loss comes about stands in `engine.preference_objective`; how good an adapter is by it, in
`evaluation.preference`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from alto_core.domain import RowLosses

PreferenceLoss = Literal["sigmoid", "ipo", "hinge"]


@dataclass(frozen=True, kw_only=True)
class PreferenceOptions:
    """What all jobs of a task share; each job has its own beta."""

    loss: PreferenceLoss = "sigmoid"
    label_smoothing: float = 0.0
    """Probability that a pair's sides are swapped, in [0, 0.5)."""
    sft_weight: float = 0.0
    """On the chosen answers' negative log-likelihood per token, added to the loss."""
    length_normalised: bool = False
    """Log-probabilities per token of the answer instead of over all of it."""


@dataclass(frozen=True, kw_only=True)
class PairLosses(RowLosses):
    """Validation of preference pairs: each pair counts as one label, whose loss is the pair's."""

    chosen: RowLosses
    """Token losses of the chosen answers, summed over each."""
    rejected: RowLosses
    reference: tuple[RowLosses, RowLosses]
    """The same under the reference: chosen, rejected."""
    beta: float
    length_normalised: bool = False

    @property
    def token_loss_sums(self) -> tuple[float, ...]:
        return tuple(map(sum, zip(self.chosen.loss_sums, self.rejected.loss_sums, strict=True)))

    def compared(self) -> tuple[RowLosses, RowLosses, RowLosses, RowLosses]:
        """Losses as they are compared (chosen, rejected, both under the reference): per token where lengths are
        normalised."""
        sides = (self.chosen, self.rejected, *self.reference)
        if not self.length_normalised:
            return sides
        first, second, third, fourth = map(_per_token, sides)
        return first, second, third, fourth

    def rewards(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """beta times what training added to the log-probability of each answer: chosen, rejected."""
        chosen, rejected, *reference = self.compared()
        first, second = (
            tuple(self.beta * (b - a) for a, b in zip(own.loss_sums, before.loss_sums, strict=True))
            for own, before in zip((chosen, rejected), reference, strict=True)
        )
        return first, second


def _per_token(losses: RowLosses) -> RowLosses:
    means = tuple(loss / count for loss, count in zip(losses.loss_sums, losses.num_labels, strict=True))
    return replace(losses, loss_sums=means)
