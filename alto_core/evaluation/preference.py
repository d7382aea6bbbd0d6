"""Preference accuracy: how often the model finds the chosen answer likelier than the rejected one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from alto_core.domain import RowLosses
from alto_core.evaluation.intervals import mean_interval
from alto_core.preference import PairLosses


def pair_scores(losses: RowLosses, metric: str) -> tuple[float, ...]:
    """Whether the chosen answer of each pair wins; see `preference_scores`.

    Args:
        losses: of pairs.
        metric: `preference` compares what training added to the answers' log-probabilities, as DPO's rewards do;
            `preference_likelihood` the log-probabilities themselves.
    """
    assert isinstance(losses, PairLosses), "a metric of pairs is asked for only where the rows are pairs"
    chosen, rejected, *reference = losses.compared()
    untuned = (reference[0], reference[1]) if metric == "preference" else None
    return preference_scores(chosen, rejected, untuned=untuned)


def preference_measures(losses: RowLosses) -> dict[str, float]:
    """What to show of an evaluation beside its loss: accuracies, margin and rewards of pairs; nothing of other rows."""
    if not isinstance(losses, PairLosses):
        return {}
    chosen, rejected = (math.fsum(rewards) / len(rewards) for rewards in losses.rewards())
    accuracy = mean_interval(pair_scores(losses, "preference"))
    likelihood = pair_scores(losses, "preference_likelihood")
    return {
        "val_accuracy": accuracy.value,
        "val_accuracy_low": accuracy.low,
        "val_accuracy_high": accuracy.high,
        "val_likelihood_accuracy": math.fsum(likelihood) / len(likelihood),
        "val_margin": chosen - rejected,
        "val_chosen_reward": chosen,
        "val_rejected_reward": rejected,
    }


def preference_scores(
    chosen: RowLosses, rejected: RowLosses, *, untuned: tuple[RowLosses, RowLosses] | None = None
) -> tuple[float, ...]:
    """1 where the chosen answer of a pair is likelier, 0 where the rejected one is, 0.5 where both are equally likely.

    Args:
        chosen: losses of the chosen answers under the adapter, prompts not counted.
        rejected: the same for the rejected ones, pair by pair.
        untuned: losses of both under the untuned model. With them a pair is judged by how much training moved the two
            likelihoods, which is the implicit reward of DPO.
    """
    margins = _margins(chosen.loss_sums, rejected.loss_sums)
    if untuned is not None:
        before = _margins(untuned[0].loss_sums, untuned[1].loss_sums)
        margins = [after - earlier for after, earlier in zip(margins, before, strict=True)]
    return tuple(0.5 if margin == 0 else float(margin > 0) for margin in margins)


def _margins(chosen: Sequence[float], rejected: Sequence[float]) -> list[float]:
    """Log-likelihood of the chosen minus that of the rejected."""
    return [bad - good for good, bad in zip(chosen, rejected, strict=True)]
