"""A policy: the rules of one preset behind one interface, and how a task file names it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from alto_core.domain import GateDecision, JobBudget, Verdict
from alto_core.early_exit.asha import AshaPolicy, AshaRules
from alto_core.early_exit.curves import Curve
from alto_core.early_exit.guarded import GuardedPolicy, GuardedRules
from alto_core.early_exit.median import MedianPolicy, MedianRules
from alto_core.early_exit.none import NonePolicy, NoRules
from alto_core.early_exit.paper import PaperPolicy, PaperRules
from alto_core.early_exit.successive_halving import HalvingRules, SuccessiveHalvingPolicy
from alto_core.errors import TaskFileError


class Policy(Protocol):
    """Decides which jobs end before their budget is spent. Pure: the same curves give the same decisions."""

    @property
    def name(self) -> str:
        """The preset's name in task files."""
        ...

    def rungs(self, warmup_fraction: float) -> tuple[float, ...]:
        """The gates after the warmup gate, rising, as shares of a job's own budget below 1."""
        ...

    def judge(self, curve: Curve) -> Verdict | None:
        """Called after each evaluation of a job: the verdict that ends it now, or None.

        Depends on the curve alone, counts in a row included. NaN and infinity are allowed and give `diverging`.
        """
        ...

    def gate(self, curves: Sequence[Curve], fraction: float) -> GateDecision:
        """Decide who goes on, with the curves of all jobs of the task, ended ones included; see `gate.hold_gate`."""
        ...


POLICIES: dict[str, Callable[[Mapping[str, float]], Policy]] = {
    "guarded": lambda constants: GuardedPolicy(GuardedRules.with_overrides(constants)),
    "paper": lambda constants: PaperPolicy(PaperRules.with_overrides(constants)),
    "asha": lambda constants: AshaPolicy(AshaRules.with_overrides(constants)),
    "successive_halving": lambda constants: SuccessiveHalvingPolicy(HalvingRules.with_overrides(constants)),
    "median": lambda constants: MedianPolicy(MedianRules.with_overrides(constants)),
    "none": lambda constants: NonePolicy(NoRules.with_overrides(constants)),
}
"""The presets that a task file may name, and the policy that each makes of the constants that are changed."""

PRESETS = tuple(POLICIES)


def make_policy(preset: str, overrides: Mapping[str, float]) -> Policy:
    """The policy of a preset (one of `PRESETS`) with some of its constants changed.

    Raises:
        TaskFileError: an unknown preset, an unknown constant, or a value out of its range.
    """
    if preset not in PRESETS:
        raise TaskFileError("early_exit.preset", got=repr(preset), expected=f"one of {', '.join(PRESETS)}")
    return POLICIES[preset](overrides)


def gate_fractions(
    policy: Policy, warmup_fraction: float, jobs: Collection[JobBudget] | Collection[Curve]
) -> tuple[float, ...]:
    """Where a task's gates stand, rising: the warmup gate, and the policy's rungs.

    Steps are whole, so rungs of short budgets fall together. One at which no job has come a step further than at the
    gate before is left out: it would decide again on what that gate has seen.
    """
    fractions = [warmup_fraction]
    for rung in policy.rungs(warmup_fraction):
        if any(job.step_at(rung) > job.step_at(fractions[-1]) for job in jobs):
            fractions.append(rung)
    return tuple(fractions)
