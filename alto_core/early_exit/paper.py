"""Preset `paper`: the three rules of ALTO's section 5 and Algorithm 1, with the paper's constants and nothing added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from alto_core.domain import GateDecision, JobState, Verdict
from alto_core.early_exit.curves import Curve
from alto_core.early_exit.detectors import (
    both_rise,
    count_in_a_row,
    generalization_gap,
    make_verdict,
    not_finite,
    slope,
)
from alto_core.early_exit.gate import hold_gate, top
from alto_core.early_exit.rules import COUNT, NON_NEGATIVE, SHARE, Range, Rules, constant


@dataclass(frozen=True, kw_only=True)
class PaperRules(Rules):
    """Constants of preset `paper`. The paper names no `alpha` and no unit of the slope; those two are our reading."""

    alpha: float = constant(0.1, SHARE)
    """Weight of the newest train loss in the smoothed one, per optimizer step; 1 means no smoothing."""
    w: int = constant(2, Range(2, low_included=True))
    """Evaluations in the regression of the diverging rule."""
    tau_slope: float = constant(0.001, NON_NEGATIVE)
    """Slope from which a loss counts as rising, nats per token and evaluation."""
    p_div: int = constant(2, COUNT)
    """Evaluations in a row that must rise before the job ends as diverging."""
    tau_gap: float = constant(0.1, NON_NEGATIVE)
    """Validation loss over smoothed train loss, minus 1, above which an evaluation counts as overfitting; no unit."""
    p_ovf: int = constant(2, COUNT)
    """Evaluations in a row above `tau_gap` before the job ends as overfitting."""
    select_ratio: float = constant(0.25, SHARE)
    """Share of the ranked jobs that go on after the gate, rounded up."""


@dataclass(frozen=True)
class PaperPolicy:
    """The paper's policy. Both detectors run from the first evaluation on, warmup included."""

    rules: PaperRules = PaperRules()
    name: ClassVar[str] = "paper"

    def rungs(self, warmup_fraction: float) -> tuple[float, ...]:
        return ()

    def judge(self, curve: Curve) -> Verdict | None:
        return not_finite(curve) or self._diverging(curve) or self._overfitting(curve)

    def gate(self, curves: Sequence[Curve], fraction: float) -> GateDecision:
        return hold_gate(curves, fraction, self.judge, lambda ranked: top(ranked, self.rules.select_ratio))

    def _diverging(self, curve: Curve) -> Verdict | None:
        rules, val, ema = self.rules, curve.val_losses, curve.ema_at_evaluations(self.rules.alpha)
        count = count_in_a_row(
            len(val), lambda i: both_rise(val[: i + 1], ema[: i + 1], w=rules.w, tau_slope=rules.tau_slope)
        )
        if count < rules.p_div:
            return None
        val_slope, ema_slope = slope(val[-rules.w :]), slope(ema[-rules.w :])
        reason = (
            f"validation loss rises by {val_slope:.4f} and smoothed train loss by {ema_slope:.4f} per evaluation over "
            f"{rules.w} evaluations (limit {rules.tau_slope:g}), {count} evaluations in a row"
        )
        evidence = {
            "val_slope": val_slope,
            "train_ema_slope": ema_slope,
            "tau_slope": rules.tau_slope,
            "in_a_row": count,
        }
        return make_verdict(curve, JobState.DIVERGING, reason, evidence)

    def _overfitting(self, curve: Curve) -> Verdict | None:
        rules, val, ema = self.rules, curve.val_losses, curve.ema_at_evaluations(self.rules.alpha)
        count = count_in_a_row(len(val), lambda i: generalization_gap(val[i], ema[i]) > rules.tau_gap)
        if count < rules.p_ovf:
            return None
        gap = generalization_gap(val[-1], ema[-1])
        reason = (
            f"validation loss {val[-1]:.4f} lies {gap:.1%} above smoothed train loss {ema[-1]:.4f} "
            f"(limit {rules.tau_gap:.1%}), {count} evaluations in a row"
        )
        evidence = {
            "gap": gap,
            "tau_gap": rules.tau_gap,
            "val_loss": val[-1],
            "train_loss_ema": ema[-1],
            "in_a_row": count,
        }
        return make_verdict(curve, JobState.OVERFITTING, reason, evidence)
