"""Presets `asha`, `successive_halving` and `median`: by hand, and against optuna's pruners on the same curves."""

from __future__ import annotations

import random
import warnings

import optuna
import pytest

from alto_core.domain import JobState
from alto_core.early_exit import AshaPolicy, AshaRules, Curve, MedianPolicy, MedianRules, make_policy
from alto_core.early_exit.replay import replay


def final(make_curve, losses: list[float]) -> list[Curve]:
    """One evaluation each, at the gate of 5 %."""
    return [
        make_curve([loss], train=1.0, job_id=f"job{i:02}", total_steps=20, warmup_steps=1)
        for i, loss in enumerate(losses)
    ]


def test_successive_halving_keeps_one_in_eta_at_each_rung(make_curve):
    curves = [make_curve([3.0 + i / 100 - j / 1000 for j in range(100)], job_id=f"job{i:02}") for i in range(32)]
    done = replay(curves, make_policy("successive_halving", {"reduction_factor": 2}), 0.1)
    assert [gate.fraction for gate in done.gates] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert [len(gate.decision.survivors) for gate in done.gates] == [16, 8, 4, 2]
    assert {curve.job_id for curve in curves} - set(done.verdicts) == {"job00", "job01"}


def test_rungs_are_spaced_by_the_reduction_factor():
    assert make_policy("asha", {}).rungs(0.05) == pytest.approx((0.2, 0.8))
    assert make_policy("asha", {"reduction_factor": 2}).rungs(0.5) == ()
    assert make_policy("median", {"interval_fraction": 0.3}).rungs(0.05) == (0.35, 0.65, 0.95)


def test_asha_decides_by_who_has_arrived(make_curve):
    """Fewer steps to the rung, earlier there: the first arrival goes on though it is the worst."""
    early = make_curve([5.0] * 3, train=1.0, job_id="early", total_steps=20, warmup_steps=1)
    late = [make_curve([1.0 + i] * 5, train=1.0, job_id=f"late{i}") for i in range(3)]
    decision = AshaPolicy(AshaRules(reduction_factor=4)).gate([early, *late], 0.05)
    assert "early" in decision.survivors
    assert "late0" in decision.survivors
    verdict = next(v for v in decision.verdicts if v.job_id == "late2")
    assert verdict.state is JobState.UNDERPERFORMING
    assert verdict.evidence["num_arrived"] <= 4
    assert "had arrived by then" in verdict.reason


@pytest.mark.parametrize("factor", [2, 3, 4])
def test_asha_decides_as_optunas_successive_halving_pruner(make_curve, factor):
    """Trials in the order of arrival, each reported once at the rung's step."""
    draw = random.Random(factor)
    losses = [round(draw.uniform(1, 2), 2) for _ in range(40)]
    curves = final(make_curve, losses)
    policy = AshaPolicy(AshaRules(reduction_factor=factor))
    survivors = set(policy.gate(curves, 0.05).survivors)
    order = list(policy.arrivals(curves))
    study = _study(optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=factor))
    kept = set()
    for job_id in order:
        trial = study.ask()
        trial.report(losses[int(job_id[3:])], step=1)
        if not trial.should_prune():
            kept.add(job_id)
    assert survivors == kept


def test_median_decides_as_optunas_median_pruner_on_running_averages(make_curve):
    draw = random.Random(0)
    curves = [
        make_curve([draw.uniform(1, 2) + i / 10 for _ in range(5)], train=1.0, job_id=f"job{i:02}") for i in range(20)
    ]
    survivors = set(MedianPolicy(MedianRules(min_jobs=5)).gate(curves, 0.05).survivors)
    kept = set()
    for curve in curves:
        study = _study(optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=0))
        for other in curves:
            if other is not curve:
                trial = study.ask()
                trial.report(sum(other.val_losses) / len(other.val_losses), step=5)
                study.tell(trial, 0.0)
        trial = study.ask()
        for step, loss in zip(curve.val_steps, curve.val_losses, strict=True):
            trial.report(loss, step=step)
        if not trial.should_prune():
            kept.add(curve.job_id)
    assert 0 < len(kept) < len(curves)
    assert survivors == kept


def test_median_ends_nobody_among_few(make_curve):
    curves = final(make_curve, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert len(MedianPolicy().gate(curves, 0.05).survivors) == 5
    decision = MedianPolicy(MedianRules(min_jobs=4)).gate(curves, 0.05)
    assert decision.survivors == ("job00", "job01", "job02")
    assert {entry.reason for entry in decision.entries if entry.kept} == {"top"}
    assert "above 2.5000, the median" in next(v.reason for v in decision.verdicts if v.job_id == "job03")


def _study(pruner: object) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return optuna.create_study(pruner=pruner, direction="minimize")
