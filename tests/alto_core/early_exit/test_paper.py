"""Preset `paper`: the paper's three rules, its constants, nothing added."""

from __future__ import annotations

import math

import pytest

from alto_core.domain import JobState
from alto_core.early_exit import Curve, PaperPolicy, PaperRules, first_verdict

NO_SMOOTHING = PaperPolicy(PaperRules(alpha=1.0))


def test_constants_are_the_papers():
    rules = PaperRules()
    assert (rules.w, rules.p_div, rules.p_ovf) == (2, 2, 2)
    assert (rules.tau_slope, rules.tau_gap, rules.select_ratio) == (0.001, 0.1, 0.25)
    assert rules.alpha == 0.1
    assert PaperPolicy().rungs(0.05) == ()


def test_diverging_needs_both_losses_to_rise_twice_in_a_row(make_curve):
    assert NO_SMOOTHING.judge(make_curve([1.0, 1.1])) is None
    verdict = NO_SMOOTHING.judge(make_curve([1.0, 1.1, 1.2]))
    assert (verdict.state, verdict.step) == (JobState.DIVERGING, 3)
    assert verdict.evidence["val_slope"] == pytest.approx(0.1)
    assert verdict.evidence["tau_slope"] == 0.001
    assert "0.1000" in verdict.reason
    assert NO_SMOOTHING.judge(make_curve([1.0, 1.1, 1.2], train=[1.2, 1.19, 1.29])) is None
    assert NO_SMOOTHING.judge(make_curve([1.0, 1.05, 1.04], train=[1.0, 1.1, 1.2])) is None


def test_one_miss_resets_the_count(make_curve):
    assert NO_SMOOTHING.judge(make_curve([1.0, 1.1, 1.0, 1.1])) is None
    assert NO_SMOOTHING.judge(make_curve([1.0, 1.1, 1.0, 1.1, 1.2])).state is JobState.DIVERGING


def test_a_rise_below_the_slope_limit_is_no_divergence(make_curve):
    assert NO_SMOOTHING.judge(make_curve([1.0, 1.0009, 1.0018, 1.0027])) is None
    assert NO_SMOOTHING.judge(make_curve([1.0, 1.0011, 1.0022])).state is JobState.DIVERGING


def test_a_slope_at_the_limit_counts(make_curve):
    policy = PaperPolicy(PaperRules(alpha=1.0, tau_slope=0.25))
    assert policy.judge(make_curve([1.0, 1.25, 1.5])).state is JobState.DIVERGING


def test_overfitting_is_a_gap_twice_in_a_row_even_while_validation_falls(make_curve):
    curve = make_curve([1.0, 0.9, 0.8], train=[1.0, 0.8, 0.7])
    verdict = NO_SMOOTHING.judge(curve)
    assert (verdict.state, verdict.step) == (JobState.OVERFITTING, 3)
    assert verdict.evidence["gap"] == pytest.approx(0.8 / 0.7 - 1)
    assert NO_SMOOTHING.judge(curve.through(2)) is None


def test_a_gap_at_the_limit_does_not_count(make_curve):
    assert NO_SMOOTHING.judge(make_curve([1.25, 1.25], train=1.0)).state is JobState.OVERFITTING
    policy = PaperPolicy(PaperRules(alpha=1.0, tau_gap=0.25))
    assert policy.judge(make_curve([1.25, 1.25], train=1.0)) is None


def test_smoothing_hides_one_low_train_loss(make_curve):
    curve = make_curve([1.0, 1.0, 1.0, 1.0], train=[1.0, 1.0, 0.5, 0.5])
    assert PaperPolicy(PaperRules(alpha=0.01)).judge(curve) is None
    assert NO_SMOOTHING.judge(curve).state is JobState.OVERFITTING


def test_fewer_evaluations_than_the_window_say_nothing(make_curve):
    policy = PaperPolicy(PaperRules(alpha=1.0, w=5, p_div=1))
    assert policy.judge(make_curve([1.0, 2.0, 3.0, 4.0])) is None
    assert policy.judge(make_curve([1.0, 2.0, 3.0, 4.0, 5.0])).state is JobState.DIVERGING


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_a_loss_that_is_no_number_is_diverging_at_once(make_curve, bad):
    verdict = PaperPolicy().judge(make_curve([1.0, bad], train=1.0))
    assert (verdict.state, verdict.step, verdict.evidence) == (JobState.DIVERGING, 2, {"not_finite_step": 2.0})
    verdict = PaperPolicy().judge(make_curve([1.0, 1.0, 1.0], train=[1.0, bad, 1.0]))
    assert "train loss" in verdict.reason and "step 2" in verdict.reason
    verdict = PaperPolicy().judge(make_curve([bad, 1.0, 1.0], train=[1.0, bad, 1.0]))
    assert "validation loss" in verdict.reason and "step 1" in verdict.reason


def test_zero_train_loss_does_not_divide_by_zero(make_curve):
    verdict = NO_SMOOTHING.judge(make_curve([1.0, 1.0], train=0.0))
    assert verdict.state is JobState.OVERFITTING
    assert all(map(math.isfinite, verdict.evidence.values()))
    assert NO_SMOOTHING.judge(make_curve([0.0, 0.0], train=0.0)) is None


def test_the_gate_keeps_the_top_quarter_rounded_up(make_curve):
    curves = [make_curve([1.0 + i / 10] * 5, train=2.0, job_id=f"job{i}") for i in range(9)]
    decision = PaperPolicy().gate(curves, 0.05)
    assert decision.survivors == ("job0", "job1", "job2")
    assert [entry.reason for entry in decision.entries] == ["top"] * 3 + ["rank"] * 6
    assert [entry.gate_rank for entry in decision.entries] == list(range(1, 10))
    verdict = decision.verdicts[-1]
    assert (verdict.job_id, verdict.state, verdict.step) == ("job8", JobState.UNDERPERFORMING, 5)
    assert verdict.evidence["difference"] == pytest.approx(0.6)
    assert "gate at 5 % of the budget: validation loss 1.8000 ranks 9 of 9" in verdict.reason


def test_losses_that_are_no_numbers_never_rank(make_curve):
    """Known fault E1: three of six are finite, a quarter of three is one."""
    losses = [math.nan, 0.5, math.inf, None, 0.4, 0.5]
    curves = [
        make_curve([loss], train=1.0, job_id=f"job{i}", total_steps=20, warmup_steps=1) for i, loss in enumerate(losses)
    ]
    decision = PaperPolicy().gate(curves, 0.05)
    assert decision.survivors == ("job4",)
    states = {verdict.job_id: verdict.state for verdict in decision.verdicts}
    assert [job_id for job_id, state in states.items() if state is JobState.DIVERGING] == ["job0", "job2", "job3"]
    assert [entry.job_id for entry in decision.entries if entry.gate_rank] == ["job4", "job1", "job5"]
    assert all(entry.val_loss is None for entry in decision.entries if entry.gate_rank is None)


def test_a_job_that_trained_to_the_gate_but_was_never_evaluated_is_not_ranked(make_curve):
    unmeasured = Curve(
        job_id="b", learning_rate=1e-3, total_steps=100, warmup_steps=5,
        train_steps=(1, 2, 3, 4, 5), train_losses=(1.0,) * 5, val_steps=(), val_losses=(),
    )  # fmt: skip
    decision = PaperPolicy().gate([make_curve([1.0] * 5), unmeasured], 0.05)
    assert decision.survivors == ("a",)
    assert [(v.job_id, v.state) for v in decision.verdicts] == [("b", JobState.DIVERGING)]


def test_nobody_survives_where_nobody_is_finite(make_curve):
    curves = [make_curve([1.0] * 4 + [bad], train=1.0, job_id=f"job{i}") for i, bad in enumerate([math.nan, math.inf])]
    decision = PaperPolicy().gate(curves, 0.05)
    assert decision.survivors == ()
    assert [verdict.state for verdict in decision.verdicts] == [JobState.DIVERGING] * 2


def test_all_but_one_not_a_number(make_curve):
    curves = [make_curve([math.nan] * 5, job_id=f"job{i}") for i in range(5)] + [make_curve([9.0] * 5, job_id="last")]
    assert PaperPolicy().gate(curves, 0.05).survivors == ("last",)


def test_equal_losses_go_by_fewer_steps_then_by_job_id(make_curve):
    slow = make_curve([1.0] * 5, job_id="a")
    quick = make_curve([1.0] * 3, job_id="c", total_steps=60, warmup_steps=3)
    twin = make_curve([1.0] * 5, job_id="b")
    order = [entry.job_id for entry in PaperPolicy().gate([twin, slow, quick], 0.05).entries]
    assert order == ["c", "a", "b"]


def test_one_job_alone_goes_on(make_curve):
    assert PaperPolicy().gate([make_curve([5.0] * 5, train=5.0)], 0.05).survivors == ("a",)


def test_jobs_that_ended_before_the_gate_are_listed_and_not_ranked(make_curve):
    diverged = make_curve([9.0] * 3, job_id="diverged", ended=JobState.DIVERGING)
    failed = make_curve([0.1] * 2, job_id="failed", ended=JobState.FAILED)
    waiting = make_curve([], job_id="waiting")
    runs = [make_curve([1.0 + i / 10] * 5, train=2.0, job_id=f"job{i}") for i in range(4)]
    decision = PaperPolicy().gate([failed, *runs, waiting, diverged], 0.05)
    assert decision.survivors == ("job0",)
    listed = [(entry.job_id, entry.reason) for entry in decision.entries if entry.gate_rank is None]
    assert listed == [("diverged", "diverging"), ("failed", "failed"), ("waiting", "unknown")]
    assert {verdict.job_id for verdict in decision.verdicts} == {"job1", "job2", "job3"}


def test_a_job_with_a_verdict_at_the_gate_is_ended_by_it_once(make_curve):
    """Without its end state on the curve the gate ends it; with it, there is nothing left to do."""
    good = make_curve([1.0] * 5, train=1.0, job_id="good")
    bad = {"val": [0.3, 0.3, 0.3, 0.4, 0.5], "train": [1.0, 1.0, 1.0, 1.1, 1.2], "job_id": "bad"}
    policy = PaperPolicy(PaperRules(alpha=1.0))
    decision = policy.gate([good, make_curve(**bad)], 0.05)
    assert decision.survivors == ("good",)
    assert [(v.job_id, v.state) for v in decision.verdicts] == [("bad", JobState.DIVERGING)]
    assert policy.gate([good, make_curve(**bad, ended=JobState.DIVERGING)], 0.05).verdicts == ()


def test_a_job_without_budget_left_is_not_ended_by_the_gate(make_curve):
    spent = make_curve([1.0], train=1.0, total_steps=1, warmup_steps=1)
    decision = PaperPolicy().gate([spent], 0.05)
    assert decision.verdicts == ()
    assert decision.entries[0].reason == "finished"


def test_what_came_after_the_gate_does_not_change_it(make_curve):
    overtaker = make_curve([2.0] * 5 + [0.1] * 20, train=2.0, job_id="late")
    leader = make_curve([1.0] * 25, train=2.0, job_id="leader")
    assert PaperPolicy().gate([overtaker, leader], 0.05).survivors == ("leader",)


def test_the_share_that_goes_on_is_exact_in_decimals(make_curve):
    """0.07 * 100 is 7.000000000000001 in binary; seven go on, not eight."""
    curves = [make_curve([1.0 + i] * 5, train=200.0, job_id=f"job{i:02}") for i in range(100)]
    assert len(PaperPolicy(PaperRules(select_ratio=0.07)).gate(curves, 0.05).survivors) == 7


def test_two_curves_of_one_job_are_refused(make_curve):
    with pytest.raises(ValueError, match="more than once"):
        PaperPolicy().gate([make_curve([1.0]), make_curve([2.0])], 0.05)


def test_a_verdict_depends_on_no_evaluation_after_it(make_curve):
    curve = make_curve([1.0, 1.1, 1.2, 0.5, 0.4])
    assert first_verdict(curve, NO_SMOOTHING.judge).step == 3
    assert NO_SMOOTHING.judge(curve) is None
