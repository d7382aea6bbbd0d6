"""Preset `none`: nothing ends but what is no number."""

from __future__ import annotations

import math

from alto_core.domain import JobState
from alto_core.early_exit import NonePolicy, first_verdict


def test_only_a_loss_that_is_no_number_ends_a_job(make_curve):
    policy = NonePolicy()
    assert first_verdict(make_curve([1.0 + i for i in range(50)], train=0.1), policy.judge) is None
    verdict = policy.judge(make_curve([1.0, math.nan], train=1.0))
    assert verdict.state is JobState.DIVERGING


def test_the_gate_ranks_and_keeps_everybody_who_is_finite(make_curve):
    curves = [make_curve([9.0 - i] * 5, job_id=f"job{i}") for i in range(4)]
    curves.append(make_curve([math.nan] * 5, job_id="nan"))
    decision = NonePolicy().gate(curves, 0.05)
    assert decision.survivors == ("job3", "job2", "job1", "job0")
    assert [verdict.job_id for verdict in decision.verdicts] == ["nan"]
    assert NonePolicy().rungs(0.05) == ()
