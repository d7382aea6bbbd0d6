"""How sure a number is: standard error of a loss, 95 % intervals of shares, means and differences.

Two adapters are compared in pairs, row by row on the same rows: rows that are hard for both cancel out, so a paired
interval is narrower than what two separate intervals would let one conclude. Bootstraps are seeded: equal inputs give
equal intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from alto_core.domain import RowLosses
from alto_core.outcomes import Interval

NUM_RESAMPLES = 2000
CHUNK = 4_000_000
"""Drawn row numbers that lie in memory at a time."""


def mean_interval(scores: Sequence[float]) -> Interval:
    """Mean of row scores: Wilson's interval where each row counts 0 or 1, a bootstrap over rows otherwise."""
    if all(score in (0.0, 1.0) for score in scores):
        return wilson_interval(round(sum(scores)), len(scores))
    return _bootstrap(np.array(scores), np.ones(len(scores)))


def wilson_interval(successes: int, num_rows: int) -> Interval:
    """Share of successes with its 95 % score interval (Wilson 1927), which is not empty at 0 or 1."""
    z = 1.959963984540054
    share = successes / num_rows
    centre = (share + z * z / (2 * num_rows)) / (1 + z * z / num_rows)
    half = z * math.sqrt(share * (1 - share) / num_rows + z * z / (4 * num_rows**2)) / (1 + z * z / num_rows)
    return Interval(value=share, low=max(0.0, centre - half), high=min(1.0, centre + half), num_rows=num_rows)


def loss_standard_error(losses: RowLosses) -> float:
    """Standard error of the loss per token over rows: sqrt(n / (n - 1) * sum (l_i - mean * m_i)^2) / sum m_i.

    l_i is a row's loss sum and m_i its trained tokens: the ratio estimator's linearization. NaN for a single row.
    """
    count = len(losses.loss_sums)
    if count < 2:
        return math.nan
    mean = losses.mean
    squares = math.fsum(
        (loss - mean * labels) ** 2 for loss, labels in zip(losses.loss_sums, losses.num_labels, strict=True)
    )
    return math.sqrt(count / (count - 1) * squares) / sum(losses.num_labels)


def loss_difference(losses: RowLosses, other: RowLosses) -> Interval:
    """Loss per token minus that of another adapter on the same rows, with its paired bootstrap interval.

    Raises:
        ValueError: they are not of the same rows.
    """
    if losses.num_labels != other.num_labels:
        raise ValueError("expected losses of the same rows, but their trained tokens differ")
    return _bootstrap(np.array(losses.loss_sums) - np.array(other.loss_sums), np.array(losses.num_labels, dtype=float))


def score_difference(scores: Sequence[float], other: Sequence[float]) -> Interval:
    """Mean score minus that of another adapter on the same rows, with its paired bootstrap interval.

    Raises:
        ValueError: they are not of the same rows.
    """
    if len(scores) != len(other):
        raise ValueError(f"expected scores of the same rows, but got {len(scores)} and {len(other)}")
    return _bootstrap(np.array(scores) - np.array(other), np.ones(len(scores)))


def _bootstrap(sums_N: np.ndarray, weights_N: np.ndarray) -> Interval:
    """sum(sums) / sum(weights) with the 2.5 % and 97.5 % quantiles of what resampled rows give."""
    count = len(sums_N)
    value = float(sums_N.sum() / weights_N.sum())
    draw = np.random.default_rng(0)
    per_chunk = max(1, CHUNK // count)
    values = []
    for start in range(0, NUM_RESAMPLES, per_chunk):
        rows = draw.integers(0, count, size=(min(per_chunk, NUM_RESAMPLES - start), count))
        values.append(sums_N[rows].sum(axis=1) / weights_N[rows].sum(axis=1))
    low, high = np.quantile(np.concatenate(values), [0.025, 0.975])
    return Interval(value=value, low=float(low), high=float(high), num_rows=count)
