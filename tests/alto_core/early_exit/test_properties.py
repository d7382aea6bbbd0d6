"""What holds for every set of curves, drawn by hypothesis: no order, no NaN and no replay changes a decision."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alto_core.domain import JobState, RowLosses
from alto_core.early_exit import PRESETS, Curve, first_verdict, make_policy

POLICIES = [make_policy(name, {}) for name in PRESETS]
FRACTIONS = [0.1, 0.2]
NUM_ROWS = 3

finite = st.floats(0, 10) | st.sampled_from([0.0, 1.0, 1.0, 2.0, 1e-300, 1e300, 1.7e308])
any_loss = st.one_of(finite, finite, finite, st.sampled_from([math.nan, math.inf, -math.inf, None]))


@st.composite
def one_curve(draw: st.DrawFn, job_id: str, losses: st.SearchStrategy[Any]) -> Curve:
    total = draw(st.sampled_from([1, 2, 10, 20, 37]))
    interval = draw(st.integers(1, 3))
    length = draw(st.integers(0, total))
    val_steps = tuple(range(interval, length + 1, interval))
    row_losses = {}
    if draw(st.booleans()):
        for step in val_steps:
            sums = draw(st.lists(st.floats(0, 50), min_size=NUM_ROWS, max_size=NUM_ROWS))
            row_losses[step] = RowLosses(loss_sums=tuple(sums), num_labels=(0, 2, 5))
    return Curve(
        job_id=job_id,
        learning_rate=draw(st.sampled_from([1e-3, 1e-2])),
        total_steps=total,
        warmup_steps=min(total, max(1, round(0.1 * total))),
        train_steps=tuple(range(1, length + 1)),
        train_losses=tuple(draw(st.lists(losses, min_size=length, max_size=length))),
        val_steps=val_steps,
        val_losses=tuple(draw(st.lists(losses, min_size=len(val_steps), max_size=len(val_steps)))),
        row_losses=row_losses,
        ended=draw(st.sampled_from([None, None, None, JobState.FAILED])),
    )


@st.composite
def some_curves(draw: st.DrawFn, losses: st.SearchStrategy[Any] = any_loss) -> list[Curve]:
    return [draw(one_curve(f"job{i}", losses)) for i in range(draw(st.integers(0, 6)))]


few = settings(max_examples=60, deadline=None)


@few
@given(some_curves(), st.randoms(use_true_random=False), st.sampled_from(FRACTIONS), st.sampled_from(POLICIES))
def test_the_order_of_jobs_changes_no_decision(curves, shuffler: random.Random, fraction, policy):
    shuffled = list(curves)
    shuffler.shuffle(shuffled)
    assert policy.gate(shuffled, fraction) == policy.gate(curves, fraction)


@few
@given(some_curves(), st.sampled_from(FRACTIONS), st.sampled_from(POLICIES))
def test_no_loss_raises_and_every_job_is_decided_once(curves, fraction, policy):
    decision = policy.gate(curves, fraction)
    assert sorted(entry.job_id for entry in decision.entries) == sorted(curve.job_id for curve in curves)
    assert not set(decision.survivors) & {verdict.job_id for verdict in decision.verdicts}
    ranks = [entry.gate_rank for entry in decision.entries if entry.gate_rank is not None]
    assert ranks == list(range(1, len(ranks) + 1))
    by_id = {curve.job_id: curve for curve in curves}
    for entry in decision.entries:
        if entry.gate_rank is not None:
            assert by_id[entry.job_id].until(fraction).is_finite
    json.dumps([dataclasses.asdict(verdict) for verdict in decision.verdicts], allow_nan=False)


@few
@given(some_curves(), st.sampled_from(FRACTIONS), st.sampled_from(POLICIES))
def test_somebody_survives_where_a_sound_job_reached_the_gate(curves, fraction, policy):
    def is_sound(curve: Curve) -> bool:
        part = curve.until(fraction)
        reached = part.last_step >= part.step_at(fraction) and part.last_step < part.total_steps
        return reached and part.ended is None and part.last_val is not None and not first_verdict(part, policy.judge)

    assert bool(policy.gate(curves, fraction).survivors) == any(is_sound(curve) for curve in curves)


@few
@given(one_curve("a", any_loss), st.sampled_from(POLICIES))
def test_a_replay_gives_the_verdict_that_was_given_live(curve, policy):
    """Live: judged after each evaluation with what was known then. Replay: from the whole recorded curve."""
    live = None
    for step in curve.val_steps:
        live = live or policy.judge(curve.through(step))
    live = live or policy.judge(curve)
    assert first_verdict(curve, policy.judge) == live
    if live is not None:
        json.dumps(dataclasses.asdict(live), allow_nan=False)


@few
@given(some_curves(), st.sampled_from(POLICIES))
def test_a_gate_decides_the_same_from_curves_that_went_on(curves, policy):
    cut = [curve.until(0.1) for curve in curves]
    assert policy.gate(curves, 0.1) == policy.gate(cut, 0.1)


@few
@given(one_curve("a", any_loss))
def test_none_ends_a_job_just_when_a_loss_is_no_number(curve):
    (policy,) = [policy for policy in POLICIES if policy.name == "none"]
    assert (policy.judge(curve) is None) == curve.is_finite


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_resume_in_the_middle_of_a_patience_count_continues_it(make_curve, policy):
    """Cut anywhere and go on from there: the verdict comes at the same step as in the unbroken run."""
    curve = make_curve([2.0, 1.5, 1.2, 1.1] + [1.12] * 30, train=0.5)
    unbroken = first_verdict(curve, policy.judge)
    for cut in curve.val_steps:
        before = first_verdict(curve.through(cut), policy.judge)
        after = (policy.judge(curve.through(step)) for step in curve.val_steps if step > cut)
        assert (before or next((verdict for verdict in after if verdict), None)) == unbroken
