"""Preset `successive_halving`: at each rung the best 1/eta of the jobs go on (Jamieson and Talwalkar 2016).

The warmup gate is the first rung; each further one stands `reduction_factor` times as far into the budget. Here for
comparison: it looks at ranks alone and knows neither noise nor overfitting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from alto_core.domain import GateDecision, Verdict
from alto_core.early_exit.curves import Curve
from alto_core.early_exit.detectors import not_finite
from alto_core.early_exit.gate import hold_gate, top
from alto_core.early_exit.rules import Range, Rules, constant


@dataclass(frozen=True, kw_only=True)
class HalvingRules(Rules):
    """Constants of preset `successive_halving`."""

    reduction_factor: int = constant(4, Range(2, low_included=True))
    """Eta: one in so many jobs goes on at each rung, and the rungs' shares of the budget grow by it."""


@dataclass(frozen=True)
class SuccessiveHalvingPolicy:
    """All jobs wait for each other at a rung and are ranked there together."""

    rules: HalvingRules = HalvingRules()
    name: ClassVar[str] = "successive_halving"

    def rungs(self, warmup_fraction: float) -> tuple[float, ...]:
        return geometric_rungs(warmup_fraction, self.rules.reduction_factor)

    def judge(self, curve: Curve) -> Verdict | None:
        return not_finite(curve)

    def gate(self, curves: Sequence[Curve], fraction: float) -> GateDecision:
        return hold_gate(curves, fraction, self.judge, lambda ranked: top(ranked, 1 / self.rules.reduction_factor))


def geometric_rungs(first: float, factor: int) -> tuple[float, ...]:
    """`first * factor`, `first * factor**2`, ... as long as they stay below 1."""
    rungs: list[float] = []
    while (rung := first * factor ** (len(rungs) + 1)) < 1:
        rungs.append(rung)
    return tuple(rungs)
