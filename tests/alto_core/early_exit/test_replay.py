"""Replay of whole curves: the shapes that mislead early decisions, and what is replayed being what was decided."""

from __future__ import annotations

import dataclasses
import math

import pytest

from alto_core.domain import JobState, RowLosses
from alto_core.early_exit import PRESETS, Curve, make_policy
from alto_core.early_exit.replay import Replay, replay, with_evaluation_at

LENGTH = 100


def fall(start: float, end: float, *, rate: float = 8.0) -> list[float]:
    """A usual curve: quickly down, then flat."""
    return [end + (start - end) * math.exp(-rate * i / LENGTH) for i in range(1, LENGTH + 1)]


@pytest.fixture
def field(make_curve) -> list[Curve]:
    """Eleven ordinary jobs, evaluated at every per cent of their budgets; job00 ends best."""
    return [
        make_curve(fall(3.0, 1.0 + i / 20), job_id=f"job{i:02}", learning_rate=1e-4 * (1 + i % 3)) for i in range(11)
    ]


def run(curves: list[Curve], preset: str, warmup: float = 0.05, **constants: float) -> Replay:
    return replay(curves, make_policy(preset, constants), warmup)


def state(done: Replay, job_id: str) -> JobState | None:
    return done.verdicts[job_id].state if job_id in done.verdicts else None


def test_the_usual_field_keeps_its_best_under_every_policy(field):
    for preset in PRESETS:
        done = run(field, preset)
        assert state(done, "job00") is None, preset
        assert done.trained["job00"].last_step == LENGTH


def test_a_late_overtaker_is_missed_by_rank_and_its_exit_says_so(make_curve, field):
    """Behind at 5 % and at 20 %, best at the end: only a policy without gates keeps it."""
    late = make_curve([2.9] * 25 + fall(2.9, 0.5)[:75], train=2.9, job_id="late", learning_rate=9.0)
    for preset in ("paper", "asha", "successive_halving"):
        done = run([*field, late], preset)
        assert state(done, "late") is JobState.UNDERPERFORMING, preset
        assert done.verdicts["late"].evidence["gate_rank"] == 12
        assert "gate at 5 % of the budget" in done.verdicts["late"].reason
    assert state(run([*field, late], "none"), "late") is None


def test_the_best_of_a_learning_rate_that_starts_late_survives_the_first_gate_of_guarded(make_curve, field):
    slow = [
        make_curve([2.95 + i / 100] * 8 + fall(2.9, 0.6)[:92], train=2.9, job_id=f"slow{i}", learning_rate=1e-5)
        for i in range(3)
    ]
    assert state(run([*field, *slow], "guarded", last_rung_fraction=0.05), "slow0") is None
    assert state(run([*field, *slow], "guarded", last_rung_fraction=0.05), "slow1") is JobState.UNDERPERFORMING
    assert state(run([*field, *slow], "paper"), "slow0") is JobState.UNDERPERFORMING


def test_a_spike_at_step_3_does_not_end_the_best(make_curve, field):
    losses = fall(2.0, 0.5)
    losses[2] = 9.0
    best = make_curve(losses, job_id="spike")
    for preset in PRESETS:
        assert state(run([*field, best], preset), "spike") is None, preset


def test_jobs_of_a_few_steps_are_cut_once_at_each_step(make_curve):
    """A second cut at the same step would see nothing new; it used to leave one job of sixteen after a single step."""
    short = [
        make_curve([2 + i / 10, 1 + i / 10, 0.9 + i / 10, 0.8 + i / 10], job_id=f"job{i:02}", total_steps=4)
        for i in range(16)
    ]
    done = run(short, "guarded")
    assert [(gate.fraction, len(gate.decision.survivors)) for gate in done.gates] == [(0.05, 4), (0.4, 3)]


def test_a_sawtooth_is_ended_by_nobodys_diverging_rule(make_curve, field):
    saw = make_curve([loss + (0.3 if i % 2 else 0.0) for i, loss in enumerate(fall(2.0, 0.5))], job_id="saw")
    for preset in ("paper", "guarded"):
        assert state(run([*field, saw], preset), "saw") is not JobState.DIVERGING, preset
    assert state(run([*field, saw], "guarded"), "saw") is None


def test_flat_then_best_is_no_divergence(make_curve, field):
    flat = make_curve([1.4 + 0.0004 * i for i in range(20)] + fall(1.4, 0.3)[:80], train=1.4, job_id="flat")
    assert state(run([*field, flat], "guarded"), "flat") is None


def test_all_but_one_not_a_number(make_curve):
    curves = [make_curve([math.nan] * LENGTH, job_id=f"nan{i}") for i in range(5)]
    curves.append(make_curve(fall(9.0, 8.0), job_id="sound"))
    for preset in PRESETS:
        done = run(curves, preset)
        assert {verdict.state for verdict in done.verdicts.values()} == {JobState.DIVERGING}, preset
        assert set(done.verdicts) == {f"nan{i}" for i in range(5)}
        assert all(verdict.step == 1 for verdict in done.verdicts.values())


@pytest.mark.parametrize("preset", PRESETS)
def test_two_equal_losses_are_decided_by_a_rule_and_not_by_their_order(make_curve, preset):
    twins = [make_curve(fall(3.0, 1.0), job_id=job_id) for job_id in ("b", "a")]
    others = [make_curve(fall(3.0, 2.0 + i), job_id=f"z{i}") for i in range(2)]
    done, turned = run([*twins, *others], preset), run([*others, *reversed(twins)], preset)
    assert done.verdicts == turned.verdicts
    assert state(done, "a") is None or preset == "asha"
    if preset == "paper":  # one of four goes on: the first by id
        assert state(done, "b") is JobState.UNDERPERFORMING


@pytest.mark.parametrize("preset", PRESETS)
def test_one_job_alone_trains_to_its_end(make_curve, preset):
    assert run([make_curve(fall(3.0, 1.0))], preset).verdicts == {}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_job_whose_recording_ends_before_the_gate_is_not_ranked(make_curve, field, preset):
    short = make_curve([0.1, 0.1], job_id="short")
    done = run([*field, short], preset)
    assert "short" not in done.verdicts
    entry = next(e for e in done.gates[0].decision.entries if e.job_id == "short")
    assert (entry.gate_rank, entry.kept) == (None, False)
    assert done.gates[0].decision.survivors == run(field, preset).gates[0].decision.survivors


@pytest.mark.parametrize("preset", PRESETS)
def test_a_job_that_has_spent_its_budget_at_the_gate_is_finished(make_curve, field, preset):
    tiny = make_curve([0.1], job_id="tiny", total_steps=1, warmup_steps=1)
    assert "tiny" not in run([*field, tiny], preset).verdicts


@pytest.mark.parametrize("preset", PRESETS)
def test_replaying_what_was_trained_gives_the_same_verdicts(make_curve, field, preset):
    """Live, an ended job leaves a cut curve. Replayed, it ends at the same step for the same reason."""
    wild = make_curve([2.0, 1.8, 2.5, 3.5, *[5.0] * 96], job_id="wild")
    fitted = make_curve(fall(2.0, 1.0)[:30] + [1.2] * 70, train=0.5, job_id="fitted")
    first = run([*field, wild, fitted], preset)
    again = run(list(first.trained.values()), preset)
    assert dict(again.verdicts) == dict(first.verdicts)
    assert [gate.decision for gate in again.gates] == [gate.decision for gate in first.gates]


def test_resumed_in_the_middle_of_a_patience_count_the_verdict_comes_at_the_same_step(make_curve, field):
    """The count is read off the curve, so a curve that was read again from anywhere continues it."""
    fitted = make_curve([1.1] * 10 + [1.12] * 90, train=0.5, job_id="fitted")
    whole = run([*field, fitted], "guarded").verdicts["fitted"]
    assert whole.state is JobState.OVERFITTING
    policy = make_policy("guarded", {})
    for cut in range(1, whole.step):
        resumed = dataclasses.replace(fitted.through(cut), warmup_steps=5)
        assert policy.judge(resumed) is None
    assert policy.judge(dataclasses.replace(fitted.through(whole.step), warmup_steps=5)) == whole


def test_a_gate_between_two_evaluations_takes_the_value_between_them(make_curve):
    """At 5 of 100 steps, evaluated at 4 and 8: a quarter of the way, row by row too."""
    rows = {step: RowLosses(loss_sums=(loss, 3 * loss), num_labels=(1, 1)) for step, loss in ((4, 2.0), (8, 1.0))}
    curve = Curve(
        job_id="a", learning_rate=1e-3, total_steps=100, warmup_steps=5, train_steps=(), train_losses=(),
        val_steps=(4, 8), val_losses=(4.0, 2.0), row_losses=rows,
    )  # fmt: skip
    at_five = with_evaluation_at(curve, 5)
    assert (at_five.val_steps, at_five.val_losses) == ((4, 5, 8), (4.0, 3.5, 2.0))
    assert at_five.row_losses[5].loss_sums == (1.75, 5.25)
    assert with_evaluation_at(curve, 2).val_losses[0] == 4.0
    assert with_evaluation_at(curve, 8) is curve
    assert with_evaluation_at(curve, 50) is curve
    broken = dataclasses.replace(curve, val_losses=(4.0, math.inf))
    assert with_evaluation_at(broken, 5) is broken


def test_a_rung_is_left_out_when_one_job_is_left(make_curve):
    curves = [make_curve(fall(3.0, 1.0 + i), job_id=f"job{i}") for i in range(3)]
    assert [gate.fraction for gate in run(curves, "successive_halving").gates] == [0.05]
