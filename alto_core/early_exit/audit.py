"""How well early decisions agree with how jobs end: rank correlation, coverage of the true top quarter, regret. Pure.

"The end" of a job is its lowest validation loss over its whole curve, the loss of the adapter that it would give.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from alto_core.early_exit.curves import Curve, PairedDifference, validation_difference
from alto_core.early_exit.gate import num_to_keep
from alto_core.early_exit.replay import with_evaluation_at

WARMUP_FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.2)
"""Shares of the budget at which the ranking is held against the end."""
TOP_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class RankAgreement:
    """How the ranking at a share of the budget agrees with that at the end."""

    fraction: float
    num_jobs: int
    """Jobs with a finite loss at both."""
    spearman: float
    """Rank correlation; NaN with fewer than two jobs, or without any difference in one of the rankings."""
    top_quarter_coverage: float
    """Share of the true top quarter that is in the top quarter by then; NaN without jobs."""
    keeps_best: bool
    """Whether the truly best job is in the top quarter by then."""


def rank_agreement(curves: Sequence[Curve], fraction: float) -> RankAgreement:
    """Hold the ranking at a share of each job's budget against the end of the same curves."""
    pairs = []
    for curve in curves:
        early = with_evaluation_at(curve, curve.step_at(fraction)).until(fraction).last_val
        if early is not None and math.isfinite(early) and curve.best_val is not None:
            pairs.append((early, curve.best_val, curve.job_id))
    early_top = {job_id for _, _, job_id in sorted(pairs)[: _quarter(pairs)]}
    true_order = [job_id for _, _, job_id in sorted(pairs, key=lambda pair: pair[1:])]
    true_top = true_order[: _quarter(pairs)]
    return RankAgreement(
        fraction=fraction,
        num_jobs=len(pairs),
        spearman=spearman([early for early, _, _ in pairs], [end for _, end, _ in pairs]),
        top_quarter_coverage=sum(j in early_top for j in true_top) / len(true_top) if true_top else math.nan,
        keeps_best=bool(true_order) and true_order[0] in early_top,
    )


def top_quarter(curves: Sequence[Curve]) -> tuple[str, ...]:
    """Ids of the best `ceil(n / 4)` of the n jobs that have a finite validation loss, the best first."""
    ends = sorted((curve.best_val, curve.job_id) for curve in curves if curve.best_val is not None)
    return tuple(job_id for _, job_id in ends[: _quarter(ends)])


def best_difference(a: Curve, b: Curve) -> PairedDifference:
    """Lowest validation loss of `a` minus that of `b`, with its paired standard error; both have one."""
    assert a.best_val_step is not None and b.best_val_step is not None
    return validation_difference(a, a.best_val_step, b, b.best_val_step)


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation, equal values by their mean rank; NaN where it is not defined."""
    ranks = [_mean_ranks(first), _mean_ranks(second)]
    if len(first) < 2 or any(len(set(values)) == 1 for values in ranks):
        return math.nan
    return statistics.correlation(*ranks)


def _mean_ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    first = {value: i for i, value in reversed(list(enumerate(order)))}
    last = {value: i for i, value in enumerate(order)}
    return [(first[value] + last[value]) / 2 for value in values]


def _quarter(jobs: Sequence[object]) -> int:
    return num_to_keep(TOP_SHARE, len(jobs)) if jobs else 0
