"""How sure numbers and differences are."""

from __future__ import annotations

import math
import random

import pytest

from alto_core.domain import RowLosses
from alto_core.evaluation import loss_difference, score_difference
from alto_core.evaluation.intervals import loss_standard_error, mean_interval, wilson_interval


@pytest.mark.parametrize(
    ("successes", "rows", "low", "high"), [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0)]
)
def test_wilson_interval_agrees_with_published_values(successes: int, rows: int, low: float, high: float) -> None:
    interval = wilson_interval(successes, rows)
    assert (interval.low, interval.high) == (pytest.approx(low, abs=5e-4), pytest.approx(high, abs=5e-4))


def test_the_standard_error_is_the_spread_over_resampled_rows() -> None:
    draw = random.Random(0)
    labels = [draw.randint(1, 20) for _ in range(200)]
    sums = [draw.gauss(1.0, 0.4) * count for count in labels]
    means = []
    for _ in range(2000):
        picks = [draw.randrange(200) for _ in range(200)]
        means.append(sum(sums[i] for i in picks) / sum(labels[i] for i in picks))
    centre = sum(means) / len(means)
    spread = math.sqrt(sum((m - centre) ** 2 for m in means) / len(means))
    measured = loss_standard_error(RowLosses(loss_sums=tuple(sums), num_labels=tuple(labels)))
    assert measured == pytest.approx(spread, rel=0.1)
    assert math.isnan(loss_standard_error(RowLosses(loss_sums=(1.0,), num_labels=(2,))))


def test_a_mean_of_shares_has_wilsons_interval_and_one_of_grades_a_bootstrap() -> None:
    assert mean_interval([1.0] * 5 + [0.0] * 5) == wilson_interval(5, 10)
    draw = random.Random(1)
    scores = [draw.random() for _ in range(400)]
    interval = mean_interval(scores)
    assert interval.value == pytest.approx(sum(scores) / 400)
    half = 1.96 * math.sqrt(1 / 12 / 400)  # of a uniform number
    assert interval.high - interval.value == pytest.approx(half, rel=0.15)
    assert interval.value - interval.low == pytest.approx(half, rel=0.15)


def test_a_paired_difference_is_sure_where_two_intervals_are_not() -> None:
    draw = random.Random(2)
    labels = tuple(draw.randint(1, 20) for _ in range(300))
    hard = [draw.uniform(0, 4) for _ in labels]  # what both adapters find hard
    one = RowLosses(loss_sums=tuple(h * n for h, n in zip(hard, labels, strict=True)), num_labels=labels)
    gains = [draw.gauss(0.05, 0.05) for _ in labels]
    sums = tuple((h - g) * n for h, g, n in zip(hard, gains, labels, strict=True))
    other = RowLosses(loss_sums=sums, num_labels=labels)
    difference = loss_difference(one, other)
    assert difference.low > 0.03 and difference.high < 0.07
    assert difference.value == pytest.approx(one.mean - other.mean)
    assert loss_standard_error(one) > 0.05, "each loss alone is far less sure"
    turned = loss_difference(other, one)
    assert (turned.low, turned.high) == (pytest.approx(-difference.high), pytest.approx(-difference.low))


def test_bootstrap_intervals_cover_the_truth_about_nineteen_times_of_twenty() -> None:
    draw = random.Random(3)
    covered = 0
    for _ in range(200):
        ours = [float(draw.random() < 0.6) for _ in range(120)]
        theirs = [float(draw.random() < 0.5) for _ in range(120)]
        interval = score_difference(ours, theirs)
        covered += interval.low <= 0.1 <= interval.high
    assert 178 <= covered <= 199


def test_equal_inputs_give_equal_intervals_and_other_rows_are_refused() -> None:
    scores = [0.1, 0.9, 0.4, 0.4]
    assert score_difference(scores, scores[::-1]) == score_difference(scores, scores[::-1])
    assert score_difference(scores, scores).value == 0.0
    with pytest.raises(ValueError, match="same rows"):
        score_difference(scores, scores[:3])
    with pytest.raises(ValueError, match="same rows"):
        loss_difference(
            RowLosses(loss_sums=(1.0, 1.0), num_labels=(1, 2)), RowLosses(loss_sums=(1.0, 1.0), num_labels=(2, 1))
        )
