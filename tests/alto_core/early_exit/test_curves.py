"""Curves: the arithmetic that every rule builds on."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from alto_core.domain import JobState, RowLosses
from alto_core.early_exit import Curve, paired_difference, smoothed, validation_difference


def rows(*loss_sums: float, labels: tuple[int, ...] | None = None) -> RowLosses:
    return RowLosses(loss_sums=loss_sums, num_labels=labels or (1,) * len(loss_sums))


def test_smoothing_starts_at_the_first_loss_and_weighs_the_newest_by_alpha():
    assert smoothed([4.0, 2.0, 1.0], 0.5) == (4.0, 3.0, 2.0)
    assert smoothed([], 0.5) == ()


def test_ema_at_evaluations_takes_every_optimizer_step_up_to_each_evaluation():
    curve = Curve(
        job_id="a", learning_rate=1e-3, total_steps=10, warmup_steps=2,
        train_steps=(1, 2, 3, 4), train_losses=(4.0, 2.0, 1.0, 0.0), val_steps=(2, 4), val_losses=(1.0, 1.0),
    )  # fmt: skip
    assert curve.ema(0.5) == (4.0, 3.0, 2.0, 1.0)
    assert curve.ema_at_evaluations(0.5) == (3.0, 1.0)


def test_ema_before_the_first_train_step_is_not_a_number():
    curve = Curve(
        job_id="a", learning_rate=1e-3, total_steps=10, warmup_steps=2,
        train_steps=(), train_losses=(), val_steps=(1,), val_losses=(1.0,),
    )  # fmt: skip
    assert math.isnan(curve.ema_at_evaluations(0.5)[0])
    assert curve.is_finite


def test_missing_losses_are_not_finite(make_curve):
    assert make_curve([1.0, 2.0]).is_finite
    for bad in (None, math.nan, math.inf, -math.inf):
        assert not make_curve([1.0, bad]).is_finite
        assert not make_curve([1.0, 1.0], train=[bad, 1.0]).is_finite


def test_best_is_the_lowest_finite_loss_and_the_earlier_of_equals(make_curve):
    curve = make_curve([math.nan, 1.0, 0.6, 0.9, 0.6, -math.inf])
    assert (curve.best_val_step, curve.best_val) == (3, 0.6)
    empty = make_curve([math.nan])
    assert (empty.best_val_step, empty.best_val) == (None, None)


def test_best_stays_when_a_resumed_job_is_worse(make_curve):
    """Known fault E2: stopped after evaluation 3 with the best at 2, the first evaluation after the resume is worse."""
    before = make_curve([1.0, 0.6, 0.7])
    assert before.best_val_step == make_curve([1.0, 0.6, 0.7, 0.8]).best_val_step == 2


def test_until_keeps_the_evaluation_at_the_gate_step(make_curve):
    """30 steps, 5 %: the budget rounds 1.5 up to step 2, which 0.05 * 30 would cut off."""
    curve = make_curve([3.0, 2.0, 1.0], total_steps=30, warmup_steps=2)
    assert curve.until(0.05).val_losses == (3.0, 2.0)
    assert curve.until(0.001).val_steps == (1,)


def test_through_forgets_an_end_that_had_not_come_yet(make_curve):
    curve = make_curve([3.0, 2.0, 1.0], rows=[[3.0], [2.0], [1.0]], ended=JobState.OVERFITTING)
    assert curve.through(2).ended is None
    assert curve.through(3).ended is curve.through(9).ended is JobState.OVERFITTING
    assert set(curve.through(2).row_losses) == {1, 2}


def test_prefixes_are_the_curve_at_each_evaluation(make_curve):
    curve = make_curve([3.0, 2.0, 1.0])
    assert [part.val_losses for part in curve.prefixes()] == [(3.0,), (3.0, 2.0), (3.0, 2.0, 1.0)]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"val_steps": (2, 1)}, "do not rise"),
        ({"val_steps": (1, 1)}, "do not rise"),
        ({"val_steps": (1,)}, "as many of each"),
        ({"ended": JobState.RUNNING}, "an end state"),
    ],
)
def test_impossible_curves_are_refused(change, text):
    fields = {"train_steps": (), "train_losses": (), "val_steps": (1, 2), "val_losses": (1.0, 1.0)}
    with pytest.raises(ValueError, match=text):
        Curve(job_id="a", learning_rate=1e-3, total_steps=10, warmup_steps=2, **{**fields, **change})


def test_paired_difference_of_equal_rows_is_the_textbook_standard_error():
    a, b = rows(1.0, 2.0, 4.0), rows(0.5, 2.5, 2.0)
    difference, error = paired_difference(a, b)
    differences = [0.5, -0.5, 2.0]
    assert difference == pytest.approx(statistics.mean(differences))
    assert error == pytest.approx(statistics.stdev(differences) / math.sqrt(3))


def test_paired_difference_weighs_rows_by_their_labels():
    """By hand: x = (2, 4), n = (1, 3), N = 4, d = 1.5, e = (0.5, -0.5), error = sqrt(2 / 1 * 0.5) / 4."""
    pair = paired_difference(rows(3.0, 9.0, labels=(1, 3)), rows(1.0, 5.0, labels=(1, 3)))
    assert pair == pytest.approx((1.5, 0.25))


def test_paired_difference_equals_the_difference_of_token_means():
    a, b = rows(3.0, 9.0, 4.0, labels=(1, 3, 7)), rows(1.0, 5.0, 6.0, labels=(1, 3, 7))
    assert paired_difference(a, b).difference == pytest.approx(a.mean - b.mean)


def test_paired_standard_error_predicts_the_spread_over_samples():
    """Rows of uneven length, resampled: the mean predicted error is within 10 % of the spread seen."""
    draw = random.Random(0)
    differences, errors = [], []
    for _ in range(2000):
        labels = tuple(draw.randint(5, 40) for _ in range(60))
        a = tuple(n * draw.gauss(1.0, 0.3) for n in labels)
        b = tuple(x - n * draw.gauss(0.05, 0.1) for x, n in zip(a, labels, strict=True))
        pair = paired_difference(rows(*a, labels=labels), rows(*b, labels=labels))
        differences.append(pair.difference)
        errors.append(pair.standard_error)
    assert statistics.mean(errors) == pytest.approx(statistics.stdev(differences), rel=0.1)


def test_rows_without_labels_do_not_count():
    with_empty = paired_difference(rows(3.0, 0.0, 9.0, labels=(1, 0, 3)), rows(1.0, 0.0, 5.0, labels=(1, 0, 3)))
    assert with_empty == pytest.approx((1.5, 0.25))


def test_unknown_standard_errors_are_not_a_number_and_count_as_no_noise():
    assert math.isnan(paired_difference(rows(3.0), rows(1.0)).standard_error)
    assert paired_difference(rows(3.0), rows(1.0)).noise == 0.0
    assert all(map(math.isnan, paired_difference(rows(math.nan, 1.0), rows(1.0, 1.0))))
    assert math.isnan(paired_difference(rows(1e308, 1e308), rows(-1e308, 1.0)).standard_error)
    assert math.isnan(paired_difference(rows(0.0, labels=(0,)), rows(0.0, labels=(0,))).difference)


def test_pairing_different_rows_is_refused():
    with pytest.raises(ValueError, match="same rows"):
        paired_difference(rows(1.0, 2.0), rows(1.0))
    with pytest.raises(ValueError, match="same rows"):
        paired_difference(rows(1.0, 2.0, labels=(1, 2)), rows(1.0, 2.0, labels=(2, 1)))


def test_validation_difference_falls_back_to_the_plain_difference(make_curve):
    with_rows = make_curve([0, 0], rows=[[1.0, 1.2], [0.5, 0.9]])
    without = make_curve([1.0, 0.5], job_id="b")
    assert validation_difference(with_rows, 2, with_rows, 1) == pytest.approx((-0.4, 0.1))
    difference, error = validation_difference(with_rows, 2, without, 1)
    assert difference == pytest.approx(-0.3)
    assert math.isnan(error)
