"""Preset `median`: the median stopping rule (Golovin et al. 2017, Google Vizier), for jobs that run side by side.

At each rung a job ends if its best validation loss so far is above the median of what the other jobs there came to,
each by the running average of its validation losses up to the rung. Optuna's `MedianPruner` compares with completed
trials only, of which there are none while all jobs run side by side; given the running averages as completed trials
it decides the same, and a test says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from alto_core.domain import GateDecision, Verdict
from alto_core.early_exit.curves import Curve
from alto_core.early_exit.detectors import not_finite
from alto_core.early_exit.gate import Reasoned, hold_gate
from alto_core.early_exit.rules import COUNT, SHARE, Rules, constant


@dataclass(frozen=True, kw_only=True)
class MedianRules(Rules):
    """Constants of preset `median`."""

    interval_fraction: float = constant(0.05, SHARE)
    """Share of each job's budget between two rungs."""
    min_jobs: int = constant(5, COUNT)
    """Other jobs at a rung from which on one may end."""


@dataclass(frozen=True)
class MedianPolicy:
    """Ends no job but at rungs, unless its loss is no number."""

    rules: MedianRules = MedianRules()
    name: ClassVar[str] = "median"

    def rungs(self, warmup_fraction: float) -> tuple[float, ...]:
        count = 1
        rungs = []
        # rounded, so that 0.05 + 2 * 0.05 is the 0.15 that people read
        while (rung := round(warmup_fraction + count * self.rules.interval_fraction, 9)) < 1:
            rungs.append(rung)
            count += 1
        return tuple(rungs)

    def judge(self, curve: Curve) -> Verdict | None:
        return not_finite(curve)

    def gate(self, curves: Sequence[Curve], fraction: float) -> GateDecision:
        def choose(ranked: Sequence[Curve]) -> dict[str, str]:
            if len(ranked) <= self.rules.min_jobs:
                return {curve.job_id: "top" for curve in ranked}
            return {
                curve.job_id: "top"
                for i, curve in enumerate(ranked)
                if curve.best_val is not None and curve.best_val <= _median_of_others(ranked, i)
            }

        return hold_gate(curves, fraction, self.judge, choose, _why_not)


def _median_of_others(ranked: Sequence[Curve], index: int) -> float:
    return statistics.median(_running_average(curve) for i, curve in enumerate(ranked) if i != index)


def _running_average(curve: Curve) -> float:
    # divided first: the sum of losses near the largest float is no float
    return sum(loss / len(curve.val_losses) for loss in curve.val_losses)


def _why_not(ranked: Sequence[Curve], index: int, kept: Mapping[str, str]) -> Reasoned:
    curve, median = ranked[index], _median_of_others(ranked, index)
    assert curve.best_val is not None and curve.last_val is not None
    reason = (
        f"its best validation loss {curve.best_val:.4f} is above {median:.4f}, the median of the running averages of "
        f"the {len(ranked) - 1} other jobs there"
    )
    numbers = {
        "val_loss": curve.last_val,
        "best_val_loss": curve.best_val,
        "median": median,
        "gate_rank": index + 1,
        "num_ranked": len(ranked),
    }
    return reason, numbers
