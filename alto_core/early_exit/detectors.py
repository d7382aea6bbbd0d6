"""What ends one job from its own curve: the conditions of `paper` and `guarded`, and how a verdict is made.

Every condition looks at one evaluation with all that came before it, and counts in a row are taken from the curve,
never remembered: a resumed or replayed curve gives the same verdict. Who goes on at the gate is `gate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from alto_core.domain import JobState, Verdict
from alto_core.early_exit.curves import Curve


def not_finite(curve: Curve) -> Verdict | None:
    """A NaN, infinite or missing loss anywhere on the curve ends the job as diverging."""
    if curve.is_finite:
        return None
    bad = [
        (step, name, loss)
        for name, steps, losses in (
            ("train", curve.train_steps, curve.train_losses),
            ("validation", curve.val_steps, curve.val_losses),
        )
        for step, loss in zip(steps, losses, strict=True)
        if not math.isfinite(loss)
    ]
    step, name, loss = min(bad, key=lambda item: item[:2])
    return make_verdict(
        curve,
        JobState.DIVERGING,
        f"{name} loss is {loss} at step {step}, a finite number is needed",
        {"not_finite_step": step},
    )


def slope(values: Sequence[float]) -> float:
    """Least-squares slope of at least two values at equal distances, in units of the values per distance."""
    middle = (len(values) - 1) / 2
    # the mean is taken off first: sums of large equal losses would swamp a small slope
    mean = sum(value / len(values) for value in values)
    rise = sum((i - middle) * (value - mean) for i, value in enumerate(values))
    return rise / sum((i - middle) ** 2 for i in range(len(values)))


def both_rise(val: Sequence[float], ema: Sequence[float], *, w: int, tau_slope: float) -> bool:
    """Whether validation loss and smoothed train loss both climb at the last of these evaluations (paper, section 5).

    Args:
        val: validation loss per evaluation, nats per token.
        ema: smoothed train loss at the same evaluations, nats per token.
        w: evaluations in the regression; with fewer nothing is said.
        tau_slope: smallest slope that counts, nats per token and evaluation.
    """
    return len(val) >= w and slope(val[-w:]) >= tau_slope and slope(ema[-w:]) >= tau_slope


def generalization_gap(val: float, ema: float) -> float:
    """How far validation loss lies above the smoothed train loss, as a share of the latter: `(val - ema) / ema`."""
    if ema == 0:
        return math.inf if val > 0 else 0.0
    return (val - ema) / abs(ema)


def count_in_a_row(num_evaluations: int, holds: Callable[[int], bool]) -> int:
    """How many evaluations at the end of the curve, one after the other, fulfil a condition.

    Args:
        num_evaluations: evaluations on the curve.
        holds: takes an evaluation's index and may look at this one and those before.
    """
    count = 0
    while count < num_evaluations and holds(num_evaluations - 1 - count):
        count += 1
    return count


def make_verdict(curve: Curve, state: JobState, reason: str, evidence: Mapping[str, float]) -> Verdict:
    """A verdict on a curve as it stands. Numbers that are not finite stay out of the evidence: they travel as JSON."""
    finite = {name: float(value) for name, value in evidence.items() if math.isfinite(value)}
    return Verdict(job_id=curve.job_id, state=state, step=curve.last_step, reason=reason, evidence=finite)
