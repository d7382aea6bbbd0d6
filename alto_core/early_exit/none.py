"""Preset `none`: every job runs to the end of its budget, unless its loss is no longer a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from alto_core.domain import GateDecision, Verdict
from alto_core.early_exit.curves import Curve
from alto_core.early_exit.detectors import not_finite
from alto_core.early_exit.gate import hold_gate, top
from alto_core.early_exit.rules import Rules


@dataclass(frozen=True, kw_only=True)
class NoRules(Rules):
    """Preset `none` has no constants."""


@dataclass(frozen=True)
class NonePolicy:
    """Ends a job only for a NaN, infinite or missing loss. The gate ranks and keeps everybody."""

    rules: NoRules = NoRules()
    name: ClassVar[str] = "none"

    def rungs(self, warmup_fraction: float) -> tuple[float, ...]:
        return ()

    def judge(self, curve: Curve) -> Verdict | None:
        return not_finite(curve)

    def gate(self, curves: Sequence[Curve], fraction: float) -> GateDecision:
        return hold_gate(curves, fraction, self.judge, lambda ranked: top(ranked, 1.0))
