"""Preset `guarded`, the default: the paper's rules, each made to wait until noise cannot explain what it sees.

Where curves carry no row losses, no standard error is known and 0 takes its place: every lower validation loss is then
an improvement, and only equal losses tie. docs/early-exit.md tells what each guard costs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

from alto_core.domain import GateDecision, JobState, Verdict
from alto_core.early_exit.curves import Curve, validation_difference
from alto_core.early_exit.detectors import (
    both_rise,
    count_in_a_row,
    generalization_gap,
    make_verdict,
    not_finite,
    slope,
)
from alto_core.early_exit.gate import hold_gate, lowest, num_to_keep, top
from alto_core.early_exit.rules import COUNT, NON_NEGATIVE, SHARE, Range, Rules, constant
from alto_core.early_exit.successive_halving import geometric_rungs

RUNG_FACTOR = 2
"""A later gate stands this many times as far into the budget as the one before."""


@dataclass(frozen=True, kw_only=True)
class GuardedRules(Rules):
    """Constants of preset `guarded`."""

    alpha: float = constant(0.1, SHARE)
    """Weight of the newest train loss in the smoothed one, per optimizer step; 1 means no smoothing."""
    num_standard_errors: float = constant(1.0, NON_NEGATIVE)
    """Paired standard errors that a difference of validation losses must exceed to count."""

    w: int = constant(2, Range(2, low_included=True))
    """Evaluations in the regression of the diverging rule."""
    tau_slope: float = constant(0.001, NON_NEGATIVE)
    """Slope from which a loss counts as rising, nats per token and evaluation."""
    p_div: int = constant(2, COUNT)
    """Evaluations in a row that must fulfil the diverging rule."""
    tau_rise: float = constant(0.5, NON_NEGATIVE)
    """Rise of validation loss over the job's best, as a share of the best, below which nothing diverges."""
    max_recovery: float = constant(0.1, Range(0, 1, low_included=True))
    """Share of the rise over the best that may be given back; a job that gave back more is a spike coming back."""

    tau_gap: float = constant(0.1, NON_NEGATIVE)
    """Validation loss over smoothed train loss, minus 1, above which an evaluation counts as overfitting; no unit."""
    p_ovf: int = constant(4, COUNT)
    """Patience of the overfitting rule: evaluations in a row above `tau_gap` without an improvement."""
    patience_fraction: float = constant(0.2, Range(0, 1, low_included=True))
    """Share of the job's budget that the patience lasts at least."""

    select_ratio: float = constant(0.25, SHARE)
    """Share of the ranked jobs that go on after the gate as the top, rounded up."""
    tie_ratio: float = constant(0.1, Range(0, 1, low_included=True))
    """Most jobs that go on because they tie with the last of the top, as a share of the top, rounded up; 0 for none."""
    min_stratum_jobs: int = constant(3, COUNT)
    """Ranked jobs of equal learning rate from which the best of them goes on after the gate."""
    last_rung_fraction: float = constant(0.4, SHARE)
    """Beyond this share of each job's budget there is no gate; before it there is one at each doubling of warmup."""
    rung_select_ratio: float = constant(0.55, SHARE)
    """Share of the ranked jobs that go on after a later gate as the top, rounded up."""


@dataclass(frozen=True)
class GuardedPolicy:
    """The default policy. Diverging is looked for from the first evaluation on, overfitting only after warmup."""

    rules: GuardedRules = GuardedRules()
    name: ClassVar[str] = "guarded"

    def rungs(self, warmup_fraction: float) -> tuple[float, ...]:
        end = min(self.rules.last_rung_fraction * (1 + 1e-9), 1)  # 3 * 0.1 > 0.3 in binary
        return tuple(takewhile(lambda rung: rung < end, geometric_rungs(warmup_fraction, RUNG_FACTOR)))

    def judge(self, curve: Curve) -> Verdict | None:
        return not_finite(curve) or self._diverging(curve) or self._overfitting(curve)

    def gate(self, curves: Sequence[Curve], fraction: float) -> GateDecision:
        """The warmup gate keeps the top, ties and the best of each learning rate; later gates the top and ties."""
        is_rung = any(curve.step_at(fraction) > curve.warmup_steps for curve in curves)

        def choose(ranked: Sequence[Curve]) -> dict[str, str]:
            kept = top(ranked, self.rules.rung_select_ratio if is_rung else self.rules.select_ratio)
            kept |= self._ties(ranked, len(kept))
            return kept if is_rung else {**kept, **self._strata(ranked, set(kept))}

        return hold_gate(curves, fraction, self.judge, choose, rank_step=lowest)

    def _diverging(self, curve: Curve) -> Verdict | None:
        rules, ema = self.rules, curve.ema_at_evaluations(self.rules.alpha)
        count = count_in_a_row(len(curve.val_losses), lambda i: self._rises_beyond_noise(curve, ema, i))
        if count < rules.p_div:
            return None
        val = curve.val_losses
        best = _index_of_lowest(val[:-1])
        pair = validation_difference(curve, curve.val_steps[-1], curve, curve.val_steps[best])
        val_slope, ema_slope = slope(val[-rules.w :]), slope(ema[-rules.w :])
        reason = (
            f"validation loss {val[-1]:.4f} is {pair.difference:.4f} above its best {val[best]:.4f} of step "
            f"{curve.val_steps[best]} and rises by {val_slope:.4f} per evaluation, smoothed train loss by "
            f"{ema_slope:.4f} (limit {rules.tau_slope:g}), {count} evaluations in a row"
        )
        evidence = {
            "val_loss": val[-1],
            "best_val_loss": val[best],
            "best_step": curve.val_steps[best],
            "difference": pair.difference,
            "standard_error": pair.standard_error,
            "val_slope": val_slope,
            "train_ema_slope": ema_slope,
            "tau_slope": rules.tau_slope,
            "in_a_row": count,
        }
        return make_verdict(curve, JobState.DIVERGING, reason, evidence)

    def _rises_beyond_noise(self, curve: Curve, ema: Sequence[float], i: int) -> bool:
        """Whether both losses climb at evaluation i, validation is well above its best, and does not come back."""
        rules, val = self.rules, curve.val_losses[: i + 1]
        if i == 0 or not both_rise(val, ema[: i + 1], w=rules.w, tau_slope=rules.tau_slope):
            return False
        best = _index_of_lowest(val[:-1])
        pair = validation_difference(curve, curve.val_steps[i], curve, curve.val_steps[best])
        least_rise = max(rules.num_standard_errors * pair.noise, rules.tau_rise * abs(val[best]))
        peak = max(val[best:])
        comes_back = peak - val[-1] > rules.max_recovery * (peak - val[best])
        return pair.difference > least_rise and not comes_back

    def _overfitting(self, curve: Curve) -> Verdict | None:
        rules, val, steps = self.rules, curve.val_losses, curve.val_steps
        size = self._patience(curve)
        if size is None or steps[-size] <= curve.warmup_steps:
            return None
        ema = curve.ema_at_evaluations(rules.alpha)
        gaps = [generalization_gap(val[i], ema[i]) for i in range(len(val) - size, len(val))]
        best = _index_of_lowest(val[:-size])
        recent = len(val) - size + _index_of_lowest(val[-size:])
        pair = validation_difference(curve, steps[recent], curve, steps[best])
        improved = pair.difference < -rules.num_standard_errors * pair.noise
        falls = size > 1 and slope(val[-size:]) < 0
        if improved or falls or not all(gap > rules.tau_gap for gap in gaps):
            return None
        reason = (
            f"validation loss {val[-1]:.4f} has not improved beyond noise for {size} evaluations (lowest "
            f"{val[recent]:.4f}, before {val[best]:.4f} at step {steps[best]}) and lies {gaps[-1]:.1%} above "
            f"smoothed train loss {ema[-1]:.4f} (limit {rules.tau_gap:.1%})"
        )
        evidence = {
            "gap": gaps[-1],
            "tau_gap": rules.tau_gap,
            "val_loss": val[-1],
            "train_loss_ema": ema[-1],
            "earlier_best_val_loss": val[best],
            "earlier_best_step": steps[best],
            "recent_best_val_loss": val[recent],
            "difference": pair.difference,
            "standard_error": pair.standard_error,
            "in_a_row": size,
        }
        return make_verdict(curve, JobState.OVERFITTING, reason, evidence)

    def _patience(self, curve: Curve) -> int | None:
        """How many of the last evaluations make up the patience; None before there are so many and one more."""
        steps = curve.val_steps
        least_steps = self.rules.patience_fraction * curve.total_steps
        sizes = range(self.rules.p_ovf, len(steps))
        return next((size for size in sizes if steps[-1] - steps[-size - 1] >= least_steps), None)

    def _ties(self, ranked: Sequence[Curve], num_top: int) -> dict[str, str]:
        """Jobs that cannot be told from the last of the top, in rank order. Bounded: few rows would tie everybody."""
        last_top = ranked[num_top - 1]
        ties = []
        for curve in ranked[num_top:]:
            pair = validation_difference(curve, lowest(curve), last_top, lowest(last_top))
            if pair.difference <= self.rules.num_standard_errors * pair.noise:
                ties.append(curve.job_id)
        bound = num_to_keep(self.rules.tie_ratio, num_top) if self.rules.tie_ratio else 0
        return dict.fromkeys(ties[:bound], "tie")

    def _strata(self, ranked: Sequence[Curve], kept: set[str]) -> dict[str, str]:
        """The best job of each learning rate that has enough ranked jobs and none kept yet."""
        strata: dict[float, list[str]] = defaultdict(list)
        for curve in ranked:
            strata[curve.learning_rate].append(curve.job_id)
        large = [ids for ids in strata.values() if len(ids) >= self.rules.min_stratum_jobs]
        return {ids[0]: "stratum" for ids in large if kept.isdisjoint(ids)}


def _index_of_lowest(losses: Sequence[float]) -> int:
    """Index of the lowest loss, the first of equals."""
    return min(range(len(losses)), key=losses.__getitem__)
