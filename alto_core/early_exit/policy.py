"""A policy: the rules of one preset behind one interface, and how a task file names it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from alto_core.domain import GateDecision, Verdict
from alto_core.early_exit.curves import Curve
from alto_core.early_exit.guarded import GuardedPolicy, GuardedRules
from alto_core.early_exit.none import NonePolicy, NoRules
from alto_core.early_exit.paper import PaperPolicy, PaperRules
from alto_core.errors import TaskFileError


class Policy(Protocol):
    """Decides which jobs end before their budget is spent. Pure: the same curves give the same decisions."""

    @property
    def name(self) -> str:
        """The preset's name in task files."""
        ...

    @property
    def rung_fractions(self) -> tuple[float, ...]:
        """Further gates, rising, as shares of a job's own budget. Those not after the warmup gate are skipped."""
        ...

    def judge(self, curve: Curve) -> Verdict | None:
        """Called after each evaluation of a job: the verdict that ends it now, or None.

        Depends on the curve alone, counts in a row included. NaN and infinity are allowed and give `diverging`.
        """
        ...

    def gate(self, curves: Sequence[Curve], fraction: float) -> GateDecision:
        """Decide who goes on, with the curves of all jobs of the task, ended ones included; see `gate.hold_gate`."""
        ...


def make_policy(preset: str, overrides: Mapping[str, float]) -> Policy:
    """The policy of a preset (`guarded`, `paper`, `none`) with some of its constants changed.

    Raises:
        TaskFileError: an unknown preset, an unknown constant, or a value out of its range.
    """
    match preset:
        case "guarded":
            return GuardedPolicy(GuardedRules.with_overrides(overrides))
        case "paper":
            return PaperPolicy(PaperRules.with_overrides(overrides))
        case "none":
            return NonePolicy(NoRules.with_overrides(overrides))
    raise TaskFileError("early_exit.preset", got=repr(preset), expected="one of guarded, paper, none")
