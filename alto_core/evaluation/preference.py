"""Preference accuracy: how often the model finds the chosen answer likelier than the rejected one."""

from __future__ import annotations

from collections.abc import Sequence

from alto_core.domain import RowLosses


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
