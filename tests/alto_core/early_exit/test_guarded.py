"""Preset `guarded`: each guard on a curve that needs it, and on one where it must not hold back."""

from __future__ import annotations

import math

import pytest

from alto_core.domain import JobState
from alto_core.early_exit import Curve, GuardedPolicy, GuardedRules, PaperPolicy, PaperRules, first_verdict

POLICY = GuardedPolicy(GuardedRules(alpha=1.0))
"""No smoothing, so that hand-made train losses mean what they say."""
PAPER = PaperPolicy(PaperRules(alpha=1.0))


def ends(curve: Curve, policy: GuardedPolicy | PaperPolicy = POLICY) -> JobState | None:
    verdict = first_verdict(curve, policy.judge)
    return verdict.state if verdict else None


def falling(num_evaluations: int, *, start: float = 2.0, by: float = 0.01) -> list[float]:
    return [start - by * i for i in range(num_evaluations)]


# diverging


def test_a_steady_climb_is_diverging(make_curve):
    verdict = first_verdict(make_curve([2.0, 1.8, 2.5, 3.5, 5.0]), POLICY.judge)
    assert (verdict.state, verdict.step) == (JobState.DIVERGING, 5)
    assert verdict.evidence["best_step"] == 2
    assert verdict.evidence["difference"] == pytest.approx(3.2)
    assert "above its best 1.8000 of step 2" in verdict.reason


def test_a_jump_to_a_high_plateau_is_diverging(make_curve):
    assert ends(make_curve([2.0, 1.8, 1.7, 7.0, 7.02, 7.01])) is JobState.DIVERGING


def test_a_climb_of_validation_alone_is_not_diverging(make_curve):
    assert ends(make_curve([2.0, 1.8, 2.5, 3.5, 5.0], train=5.0)) is None


@pytest.mark.parametrize("spike", [[5.0], [5.0, 3.0], [5.0, 4.0, 3.0, 2.5], [2.5, 1.9, 9.0, 5.0, 3.0]])
def test_a_spike_that_comes_back_is_not_diverging(make_curve, spike):
    assert ends(make_curve([2.0, 1.9, *spike, 1.8, 1.7, 1.6])) is None


def test_a_climb_as_long_as_the_count_is_ended_even_if_it_would_come_back(make_curve):
    """A stated limit: at the second evaluation of the climb nothing tells it from a divergence."""
    curve = make_curve([2.0, 1.9, 4.0, 9.0, 1.8, 1.7])
    assert ends(curve) is JobState.DIVERGING
    assert ends(curve, GuardedPolicy(GuardedRules(alpha=1.0, p_div=3))) is None


def test_a_sawtooth_is_not_diverging(make_curve):
    assert ends(make_curve([2.0, 2.5] * 15)) is None


def test_a_flat_start_is_not_diverging(make_curve):
    """Flat, with a drift upwards of some per cent, until 20 % of the budget; then best."""
    flat = [2.0 + 0.004 * i for i in range(20)]
    assert ends(make_curve(flat + falling(30, by=0.05))) is None
    assert ends(make_curve(flat), PAPER) is JobState.DIVERGING


def test_a_rise_within_the_paired_standard_error_is_noise(make_curve, noisy_rows):
    losses = [2.0, 2.6, 3.2, 3.8, 4.4]
    assert ends(make_curve(losses, rows=noisy_rows(losses, 0.01))) is JobState.DIVERGING
    assert ends(make_curve(losses, rows=noisy_rows(losses, 20.0))) is None


def test_a_climb_by_less_than_half_of_the_best_may_come_back(make_curve):
    """Spiky curves of small data sets climb by a fifth for some evaluations, and then reach their best."""
    losses = [2.0, 1.9, 2.1, 2.25, 2.3, *falling(20, start=1.9, by=0.05)]
    assert ends(make_curve(losses)) is None
    assert ends(make_curve(losses), GuardedPolicy(GuardedRules(alpha=1.0, tau_rise=0.05))) is JobState.DIVERGING


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_a_loss_that_is_no_number_is_diverging_at_once(make_curve, bad):
    assert ends(make_curve([1.0, bad], train=1.0)) is JobState.DIVERGING
    assert ends(make_curve([1.0, 1.0], train=[1.0, bad])) is JobState.DIVERGING


# overfitting


def test_a_plateau_while_train_loss_falls_is_overfitting(make_curve):
    curve = make_curve([2.0, 1.5, 1.2] + [1.1] * 60, train=falling(63, by=0.03))
    verdict = first_verdict(curve, POLICY.judge)
    assert verdict.state is JobState.OVERFITTING
    assert verdict.evidence["gap"] > 0.1
    assert verdict.evidence["earlier_best_step"] == 4
    assert verdict.evidence["in_a_row"] == 20


def test_a_gap_while_validation_still_falls_is_overfitting_only_in_the_paper(make_curve):
    curve = make_curve(falling(100), train=[loss / 2 for loss in falling(100)])
    assert ends(curve) is None
    assert ends(curve, PAPER) is JobState.OVERFITTING


def test_progress_too_small_for_the_standard_error_is_still_progress(make_curve, noisy_rows):
    """Few rows: each step down hides in the noise, the trend does not."""
    losses = falling(60, by=0.002)
    assert ends(make_curve(losses, rows=noisy_rows(losses, 0.5), train=1.0)) is None


def test_a_lower_value_within_noise_does_not_renew_the_patience(make_curve, noisy_rows):
    losses = [2.0, 1.5, *[1.1, 1.11] * 10, 1.11, 1.095, *[1.11, 1.12] * 4]
    quiet = make_curve(losses, rows=noisy_rows(losses, 0.0001), train=0.8)
    noisy = make_curve(losses, rows=noisy_rows(losses, 0.1), train=0.8)
    last = GuardedPolicy(GuardedRules(alpha=1.0, patience_fraction=0.09))
    assert last.judge(quiet) is None
    assert last.judge(noisy).state is JobState.OVERFITTING


def test_a_plateau_without_a_gap_is_not_overfitting(make_curve):
    assert ends(make_curve([2.0, 1.5] + [1.1] * 40, train=[2.0, 1.5] + [1.05] * 40)) is None


def test_one_evaluation_without_a_gap_starts_the_patience_again(make_curve):
    assert ends(make_curve([1.1] * 40, train=[0.5, 0.5, 0.5, 0.5, 1.1] * 8)) is None


def test_overfitting_waits_for_the_end_of_warmup(make_curve):
    curve = make_curve([1.1] * 60, train=0.5, warmup_steps=20)
    assert first_verdict(curve, POLICY.judge).step == 40
    assert first_verdict(make_curve([1.1] * 40, train=0.5, warmup_steps=1), POLICY.judge).step == 21


def test_patience_is_counted_in_evaluations_and_in_budget(make_curve):
    """20 % of 10 steps are two evaluations; four are needed. Of 100 steps it is twenty."""
    short = make_curve([1.1] * 10, train=0.5, total_steps=10, warmup_steps=1)
    assert first_verdict(short, POLICY.judge).step == 5
    eager = GuardedPolicy(GuardedRules(alpha=1.0, patience_fraction=0.0))
    assert first_verdict(make_curve([1.1] * 40, train=0.5, warmup_steps=1), eager.judge).step == 5


def test_the_step_of_train_loss_at_an_epoch_boundary_is_not_overfitting(make_curve):
    """Train loss drops by a third at each epoch, validation rests for some evaluations and then falls on."""
    val = [*falling(33, by=0.02), *[1.36] * 7, *falling(26, start=1.36, by=0.01), *[1.11] * 7, *falling(26, start=1.1)]
    train = [2.0] * 33 + [1.2] * 33 + [0.9] * 33
    assert ends(make_curve(val, train=train)) is None
    assert ends(make_curve(val, train=train), PAPER) is JobState.OVERFITTING


def test_the_best_step_of_an_overfitting_job_is_not_its_last(make_curve):
    """Known fault E3: the adapter to keep is the one of step 2."""
    curve = make_curve([1.0, 0.6, 0.9, 1.2, 1.2, 1.2], train=0.3, total_steps=6, warmup_steps=1)
    verdict = first_verdict(curve, POLICY.judge)
    assert (verdict.state, verdict.step) == (JobState.OVERFITTING, 6)
    assert (curve.best_val_step, curve.best_val) == (2, 0.6)


# the gates


def jobs(make_curve, losses, **fields):
    return [make_curve([loss] * 20, train=9.0, job_id=f"job{i:02}", **fields) for i, loss in enumerate(losses)]


def reasons(decision):
    return {entry.job_id: entry.reason for entry in decision.entries}


def test_the_gate_keeps_the_top_and_the_best_of_each_learning_rate(make_curve):
    rates = [1e-4, 1e-3, 1e-2]
    curves = [
        make_curve([1.0 + i + j / 10] * 5, train=9.0, job_id=f"rate{i}-{j}", learning_rate=rate)
        for i, rate in enumerate(rates)
        for j in range(3)
    ]
    decision = POLICY.gate(curves, 0.05)
    kept = {entry.job_id: entry.reason for entry in decision.entries if entry.kept}
    assert kept == {"rate0-0": "top", "rate0-1": "top", "rate0-2": "top", "rate1-0": "stratum", "rate2-0": "stratum"}
    assert len(decision.verdicts) == 4


def test_learning_rates_with_two_ranked_jobs_are_not_protected(make_curve):
    curves = jobs(make_curve, [1.0, 1.1, 1.2, 1.3])
    curves += [make_curve([3.0 + i] * 20, train=9.0, job_id=f"x{i}", learning_rate=0.1) for i in range(2)]
    curves += [make_curve([math.nan], train=9.0, job_id="x2", learning_rate=0.1, ended=JobState.DIVERGING)]
    assert POLICY.gate(curves, 0.05).survivors == ("job00", "job01")


def test_equal_losses_tie(make_curve):
    assert reasons(POLICY.gate(jobs(make_curve, [1.0, 1.0]), 0.05)) == {"job00": "top", "job01": "tie"}


def test_without_row_losses_only_equal_losses_tie(make_curve):
    assert reasons(POLICY.gate(jobs(make_curve, [1.0, 1.0001]), 0.05)) == {"job00": "top", "job01": "rank"}


def with_rows(make_curve, job_id, losses):
    return make_curve([0.0] * 5, rows=[losses] * 5, train=9.0, job_id=job_id)


def test_jobs_within_the_paired_standard_error_of_the_last_of_the_top_tie(make_curve):
    last_top = with_rows(make_curve, "top", [1.0, 1.0, 1.0, 1.0])
    within = with_rows(make_curve, "within", [1.4, 0.8, 1.4, 0.8])
    beyond = with_rows(make_curve, "beyond", [1.3, 1.2, 1.3, 1.2])
    decision = POLICY.gate([beyond, within, last_top], 0.05)
    assert reasons(decision) == {"top": "top", "within": "tie", "beyond": "rank"}
    assert decision.verdicts[0].evidence["standard_error"] == pytest.approx(0.05 / math.sqrt(3))
    assert "paired standard error 0.0289" in decision.verdicts[0].reason


def test_pairing_sees_through_rows_that_are_hard_for_everybody(make_curve):
    """Rows differ by 100 times the difference of the jobs, yet the difference is the same on each."""
    good = with_rows(make_curve, "good", [1.0, 2.0, 3.0, 4.0])
    worse = with_rows(make_curve, "worse", [1.01, 2.01, 3.01, 4.01])
    assert POLICY.gate([good, worse], 0.05).survivors == ("good",)


def test_ties_are_bounded_where_few_rows_tie_everybody(make_curve):
    curves = [with_rows(make_curve, f"job{i:02}", [1 + i / 100 + (-1) ** (i + r) for r in range(4)]) for i in range(12)]
    # every second job ties with the third; two of them go on, or one
    half = GuardedPolicy(GuardedRules(alpha=1.0, tie_ratio=0.5))
    decision = half.gate(curves, 0.05)
    assert list(reasons(decision).values()) == ["top"] * 3 + ["tie", "rank"] * 2 + ["rank"] * 5
    assert len(POLICY.gate(curves, 0.05).survivors) == 4
    no_ties = GuardedPolicy(GuardedRules(alpha=1.0, tie_ratio=0.0))
    assert len(no_ties.gate(curves, 0.05).survivors) == 3


def test_later_gates_stand_at_each_doubling_of_warmup_up_to_the_last():
    assert POLICY.rungs(0.05) == (0.1, 0.2, 0.4)
    assert POLICY.rungs(0.2) == (0.4,)
    assert POLICY.rungs(0.3) == ()
    assert GuardedPolicy(GuardedRules(last_rung_fraction=1.0)).rungs(0.3) == (0.6,)
    assert GuardedPolicy(GuardedRules(last_rung_fraction=0.05)).rungs(0.05) == ()


def test_a_later_gate_keeps_more_and_protects_no_learning_rate(make_curve):
    curves = jobs(make_curve, [1.0, 1.1, 1.2, 1.3, 1.4]) + [
        make_curve([3.0 + i] * 20, train=9.0, job_id=f"x{i}", learning_rate=0.1) for i in range(3)
    ]
    assert POLICY.gate(curves, 0.2).survivors == ("job00", "job01", "job02", "job03", "job04")
    assert POLICY.gate(curves, 0.05).survivors == ("job00", "job01", "x0")


def test_jobs_are_ranked_by_their_best_adapters(make_curve):
    """What is kept of a job is its best adapter: one that stands on a spike at the gate is not worse for it."""
    spike = make_curve([2.0, 1.0, 1.1, 1.0, 2.5], train=9.0, job_id="spike")
    others = [make_curve([2.0, 1.8, 1.6, 1.4, 1.2 + i / 10], train=9.0, job_id=f"other{i}") for i in range(3)]
    decision = POLICY.gate([spike, *others], 0.05)
    assert decision.survivors == ("spike",)
    assert [entry.val_loss for entry in decision.entries] == [1.0, 1.2, 1.3, 1.4]
    assert "validation loss 1.2000 ranks 2 of 4" in decision.verdicts[0].reason
    spikes = POLICY.gate([spike, make_curve([0.9] * 5, train=9.0, job_id="best")], 0.05).verdicts
    assert "validation loss 1.0000 of step 2 ranks 2 of 2" in spikes[0].reason
    assert PAPER.gate([spike, *others], 0.05).survivors == ("other0",)


def test_a_later_gate_ranks_only_who_passed_the_first(make_curve):
    ended = make_curve([0.1] * 5, train=9.0, job_id="ended", ended=JobState.UNDERPERFORMING)
    decision = POLICY.gate([ended, *jobs(make_curve, [1.0, 1.1, 1.2, 1.3])], 0.2)
    assert decision.survivors == ("job00", "job01", "job02")
    assert reasons(decision)["ended"] == "underperforming"
    assert "at 20 % of the budget" in decision.verdicts[0].reason


def test_a_warmup_gate_at_the_place_of_a_later_one_is_the_first(make_curve):
    curves = jobs(make_curve, [1.0, 1.1, 1.2, 1.3], warmup_steps=20)
    assert POLICY.gate(curves, 0.2).survivors == ("job00",)


def test_a_late_overtaker_of_another_learning_rate_survives(make_curve):
    """Trails every job of the high rate at the gate; the paper ends it there."""
    high = [make_curve([1.0 + i / 100] * 5, train=9.0, job_id=f"high{i}", learning_rate=1e-2) for i in range(6)]
    low = [make_curve([1.9 + i / 100] * 5, train=9.0, job_id=f"low{i}", learning_rate=1e-4) for i in range(3)]
    assert "low0" in POLICY.gate(high + low, 0.05).survivors
    assert "low0" not in PAPER.gate(high + low, 0.05).survivors


def test_nine_jobs_of_a_quickstart_lose_some_at_the_gate(make_curve):
    """Three learning rates, the highest climbing; four evaluations before the gate at 10 % of 40 steps."""
    falls, climbs = [3.0, 2.5, 2.2, 2.0], [3.2, 4.0, 6.0, 7.5]
    curves = [
        make_curve(
            [loss + 0.05 * j + 0.1 * i for loss in (climbs if i == 2 else falls)],
            job_id=f"rate{i}-{j}", learning_rate=10.0**-i, total_steps=40, warmup_steps=4,
        )
        for i in range(3)
        for j in range(3)
    ]  # fmt: skip
    assert [ends(curve) for curve in curves[-3:]] == [JobState.DIVERGING] * 3
    decision = POLICY.gate(curves, 0.1)
    assert decision.survivors == ("rate0-0", "rate0-1", "rate1-0")
