"""Preset `asha`: asynchronous successive halving (Li et al. 2020), which decides each job as it arrives at a rung.

A job goes on if it is in the best 1/eta of those that have arrived at the rung by then, itself included; while there
are fewer than eta, if it is the best. That is the rule of optuna's `SuccessiveHalvingPruner`, which needs a study and
its trials; this is the same decision as a function of curves, and a test holds the two against each other.

The order of arrival is taken from the curves: jobs make their steps side by side, so the one whose rung stands at the
lower step is there first. Equal ones come in the order of a digest of their ids, which favours no learning rate.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from alto_core.domain import GateDecision, Verdict
from alto_core.early_exit.curves import Curve
from alto_core.early_exit.detectors import not_finite
from alto_core.early_exit.gate import Reasoned, hold_gate
from alto_core.early_exit.rules import Range, Rules, constant
from alto_core.early_exit.successive_halving import geometric_rungs


@dataclass(frozen=True, kw_only=True)
class AshaRules(Rules):
    """Constants of preset `asha`."""

    reduction_factor: int = constant(4, Range(2, low_included=True))
    """Eta: one in so many of the jobs that have arrived goes on, and the rungs' shares of the budget grow by it."""


class Arrival(NamedTuple):
    """How a job stood when it came to a rung."""

    place: int
    """1 is the lowest validation loss; equal losses share a place."""
    num_arrived: int
    num_promoted: int
    """Places that go on."""


@dataclass(frozen=True)
class AshaPolicy:
    """Ends no job but at rungs, unless its loss is no number."""

    rules: AshaRules = AshaRules()
    name: ClassVar[str] = "asha"

    def rungs(self, warmup_fraction: float) -> tuple[float, ...]:
        return geometric_rungs(warmup_fraction, self.rules.reduction_factor)

    def judge(self, curve: Curve) -> Verdict | None:
        return not_finite(curve)

    def gate(self, curves: Sequence[Curve], fraction: float) -> GateDecision:
        def choose(ranked: Sequence[Curve]) -> dict[str, str]:
            arrivals = self.arrivals(ranked)
            return {job_id: "top" for job_id, a in arrivals.items() if a.place <= a.num_promoted}

        return hold_gate(curves, fraction, self.judge, choose, self._why_not)

    def arrivals(self, ranked: Sequence[Curve]) -> dict[str, Arrival]:
        """How each of these curves, all cut at the rung, stood on its arrival there."""
        losses: list[float] = []
        found = {}
        for curve in sorted(ranked, key=_time_of_arrival):
            assert curve.last_val is not None
            insort(losses, curve.last_val)
            num_promoted = max(1, len(losses) // self.rules.reduction_factor)
            found[curve.job_id] = Arrival(bisect_left(losses, curve.last_val) + 1, len(losses), num_promoted)
        return found

    def _why_not(self, ranked: Sequence[Curve], index: int, kept: Mapping[str, str]) -> Reasoned:
        curve = ranked[index]
        arrival = self.arrivals(ranked)[curve.job_id]
        assert curve.last_val is not None
        reason = (
            f"validation loss {curve.last_val:.4f} is number {arrival.place} of the {arrival.num_arrived} jobs that "
            f"had arrived by then; the best {arrival.num_promoted} of them go on"
        )
        numbers = {
            "val_loss": curve.last_val,
            "gate_rank": index + 1,
            "num_ranked": len(ranked),
            "place_on_arrival": arrival.place,
            "num_arrived": arrival.num_arrived,
            "num_promoted": arrival.num_promoted,
        }
        return reason, numbers


def _time_of_arrival(curve: Curve) -> tuple[int, str]:
    return curve.last_step, hashlib.sha256(curve.job_id.encode()).hexdigest()
