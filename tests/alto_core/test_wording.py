"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from alto_core import wording
from alto_core.domain import GateDecision, GateEntry, JobState


@pytest.mark.parametrize(
    ("value", "text"), [(0.002, "2e-3"), (5e-5, "5e-5"), (0.00015, "1.5e-4"), (0.0, "0"), (1.0, "1e0")]
)
def test_rates(value: float, text: str) -> None:
    assert wording.rate(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (0.12345, "0.1235"),
        (12345.678, "1.23e+04"),
        (-0.5, "-0.5000"),
    ],
)
def test_losses(value: float | None, text: str) -> None:
    assert wording.loss(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (math.nan, "-"), (0, "0 s"), (59.6, "1 min 00 s"), (192, "3 min 12 s"), (7500, "2 h 05 min")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert wording.duration(seconds) == text


def test_counts_and_shares() -> None:
    assert wording.count(1234567) == "1\u202f234\u202f567"
    assert wording.share(0.0121, digits=1) == "1.2 %"
    assert wording.plural(1, "job") == "1 job"
    assert wording.plural(2, "job") == "2 jobs"


def test_every_state_is_explained() -> None:
    assert set(wording.STATE_MEANING) == set(JobState)


def test_a_gate_says_why_a_job_goes_on_that_is_not_among_the_best() -> None:
    reasons = ["top", "tie", "rank", "stratum"]
    entries = tuple(
        GateEntry(job_id=f"job-{i}", gate_rank=i + 1, val_loss=1.0, kept=reason != "rank", reason=reason)
        for i, reason in enumerate(reasons)
    )
    said = wording.gate(GateDecision(entries=entries, verdicts=()))
    assert said == "3 go on: job-0, job-1 (equal within the error), job-3 (best of its learning rate)"
    assert wording.gate(GateDecision(entries=(), verdicts=())) == "0 go on: none"
