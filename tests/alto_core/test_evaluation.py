"""Scores and their errors."""

from __future__ import annotations

import math
import random

import pytest

from alto_core.domain import RowLosses, Score
from alto_core.evaluation import is_exact_match, loss_standard_error, wilson_interval
from alto_core.selection import pick_winner


@pytest.mark.parametrize(
    ("successes", "rows", "low", "high"), [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0)]
)
def test_wilson_interval_agrees_with_published_values(successes: int, rows: int, low: float, high: float) -> None:
    interval = wilson_interval(successes, rows)
    assert (interval.low, interval.high) == (pytest.approx(low, abs=5e-4), pytest.approx(high, abs=5e-4))


@pytest.mark.parametrize(
    ("answer", "reference", "equal"),
    [("a, b", "a, b", True), (" a,  b\n", "a, b", True), ("a b", "a, b", False), ("A", "a", False), ("", "a", False)],
)
def test_exact_match_forgives_white_space_alone(answer: str, reference: str, equal: bool) -> None:
    assert is_exact_match(answer, reference) is equal


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


def score(job_id: str, loss: float, successes: int) -> Score:
    interval = wilson_interval(successes, 10)
    return Score(
        job_id=job_id, split="validation", loss=loss, loss_standard_error=0.1, metric="m", metric_value=interval
    )


def test_the_winner_has_the_lowest_loss_or_the_highest_metric() -> None:
    scores = [score("a", 0.5, 3), score("b", 0.6, 9), score("c", 0.7, 9)]
    assert pick_winner(scores, "val_loss") == "a"
    assert pick_winner(scores, "metric") == "b"
