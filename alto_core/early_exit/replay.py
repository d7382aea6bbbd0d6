"""A policy over recorded curves: who would have ended, when and why. Pure, and the same as live.

Live, the executor evaluates each job exactly at a gate. Where a recording has no evaluation there, its value is taken
from the evaluations around it, see `with_evaluation_at`.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from alto_core.domain import GateDecision, JobState, RowLosses, Verdict
from alto_core.early_exit.curves import Curve
from alto_core.early_exit.gate import first_verdict
from alto_core.early_exit.policy import Policy, gate_fractions


@dataclass(frozen=True, kw_only=True)
class HeldGate:
    """One gate of a replay."""

    fraction: float
    decision: GateDecision


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a policy would have decided."""

    verdicts: Mapping[str, Verdict]
    """By job id, of the jobs that it ends before their budget is spent."""
    gates: tuple[HeldGate, ...]
    trained: Mapping[str, Curve]
    """Each job's curve as far as the policy let it train."""


def replay(curves: Sequence[Curve], policy: Policy, warmup_fraction: float) -> Replay:
    """Let a policy judge recorded curves, after each evaluation and at each gate, as it would have done live.

    Args:
        curves: whole recorded curves; their end states are ignored. A job whose recording ends before a gate is not
            ranked there.
        policy: the rules.
        warmup_fraction: where the warmup gate stands, as a share of each job's own budget.
    """
    gates = gate_fractions(policy, warmup_fraction, curves)
    trained = {curve.job_id: _prepared(curve, gates) for curve in curves}
    verdicts: dict[str, Verdict] = {}
    held: list[HeldGate] = []

    def end(verdict: Verdict) -> None:
        verdicts[verdict.job_id] = verdict
        cut = trained[verdict.job_id].through(verdict.step)
        trained[verdict.job_id] = dataclasses.replace(cut, ended=verdict.state)

    for fraction in gates:
        for curve in list(trained.values()):
            if curve.ended is None and (verdict := _verdict_until(curve, fraction, policy)):
                end(verdict)
        decision = policy.gate(list(trained.values()), fraction)
        for verdict in decision.verdicts:
            end(verdict)
        held.append(HeldGate(fraction=fraction, decision=decision))
        if len(decision.survivors) <= 1:  # as live: one job alone meets no further gate
            break
    for curve in list(trained.values()):
        if curve.ended is None and (verdict := _verdict_until(curve, 1.0, policy)):
            end(verdict)
    return Replay(verdicts=verdicts, gates=tuple(held), trained=trained)


def with_evaluation_at(curve: Curve, step: int) -> Curve:
    """The curve with an evaluation at this step, where a recording that reached it has none there.

    The loss, and the loss of each row, is interpolated linearly between the evaluations before and after; before the
    first evaluation it is the first one's. After the last, or beside a loss that is no number, nothing is added.
    """
    i = bisect_left(curve.val_steps, step)
    if i == len(curve.val_steps) or curve.val_steps[i] == step:
        return curve
    before, after = max(0, i - 1), i
    if not (math.isfinite(curve.val_losses[before]) and math.isfinite(curve.val_losses[after])):
        return curve
    first, second = curve.val_steps[before], curve.val_steps[after]
    weight = (step - first) / (second - first) if first != second else 1.0
    loss = (1 - weight) * curve.val_losses[before] + weight * curve.val_losses[after]
    rows = dict(curve.row_losses)
    if first in rows and second in rows and rows[first].num_labels == rows[second].num_labels:
        sums = zip(rows[first].loss_sums, rows[second].loss_sums, strict=True)
        rows[step] = RowLosses(
            loss_sums=tuple((1 - weight) * a + weight * b for a, b in sums), num_labels=rows[second].num_labels
        )
    return dataclasses.replace(
        curve,
        val_steps=(*curve.val_steps[:i], step, *curve.val_steps[i:]),
        val_losses=(*curve.val_losses[:i], loss, *curve.val_losses[i:]),
        row_losses=rows,
    )


def _prepared(curve: Curve, gates: Sequence[float]) -> Curve:
    """Without its end, with the warmup of the first gate and an evaluation at each gate."""
    curve = dataclasses.replace(curve, ended=None, warmup_steps=curve.step_at(gates[0]))
    for fraction in gates:
        curve = with_evaluation_at(curve, curve.step_at(fraction))
    return curve


def _verdict_until(curve: Curve, fraction: float, policy: Policy) -> Verdict | None:
    """The detectors' verdict before this share of the budget; once the budget is spent only `diverging` counts."""
    verdict = first_verdict(curve.until(fraction), policy.judge)
    if verdict is None or (verdict.step >= curve.total_steps and verdict.state is not JobState.DIVERGING):
        return None
    return verdict
