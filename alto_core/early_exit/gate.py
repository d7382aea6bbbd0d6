"""The gate: ranks the jobs of a task at an equal share of their budgets, and lets some go on.

What all presets share: who is ranked, ties in rank, `k`, the wording. Which jobs beyond the first `k` go on is the
preset's own rule and comes in as a function.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from alto_core.domain import GateDecision, GateEntry, JobState, Verdict
from alto_core.early_exit.curves import Curve, validation_difference
from alto_core.early_exit.detectors import make_verdict

Judge = Callable[[Curve], Verdict | None]
Choose = Callable[[Sequence[Curve]], Mapping[str, str]]
"""From the ranked curves, best first, to the reason (`top`, `tie`, `stratum`) of each job id that goes on."""
Reasoned = tuple[str, Mapping[str, float]]
"""A sentence with the numbers in it, and the numbers by name."""
WhyNot = Callable[[Sequence[Curve], int, Mapping[str, str]], Reasoned]
"""From the ranked curves, the index of one that does not go on, and what `Choose` gave, to why it does not."""
RankStep = Callable[[Curve], int]
"""From a curve with an evaluation to the evaluation step whose validation loss ranks it."""


def newest(curve: Curve) -> int:
    """The last evaluation step: a job is ranked by where it stands."""
    return curve.val_steps[-1]


def lowest(curve: Curve) -> int:
    """The evaluation step of the lowest loss: a job is ranked by its best adapter, which is what is kept of it."""
    assert curve.best_val_step is not None
    return curve.best_val_step


def loss_at(curve: Curve, step: int) -> float:
    """The validation loss of an evaluation step."""
    return curve.val_losses[curve.val_steps.index(step)]


def hold_gate(
    curves: Sequence[Curve],
    fraction: float,
    judge: Judge,
    choose: Choose,
    why_not: WhyNot | None = None,
    rank_step: RankStep = newest,
) -> GateDecision:
    """Decide who goes on. Only what was measured up to the gate counts, so a later replay decides the same.

    Ranked are the jobs that reached the gate with budget left, finite losses and no verdict on the way, by their
    validation loss at `rank_step`; equal losses by fewer steps, then by job id. All others are listed after them, not
    kept, with the state that ended them. The decision's verdicts are on jobs that reached the gate and have no end
    state yet.

    Args:
        curves: all jobs of the task, ended ones included, in any order.
        fraction: where the gate stands, as a share of each job's own budget, in (0, 1].
        judge: the preset's verdict on one curve.
        choose: the preset's choice among the ranked curves.
        why_not: the preset's words for a job that does not go on; None where the last of the top is what it missed.
        rank_step: which evaluation ranks a job.

    Raises:
        ValueError: two curves of one job.
    """
    repeated = [job_id for job_id, count in Counter(curve.job_id for curve in curves).items() if count > 1]
    if repeated:
        raise ValueError(f"got {repeated[0]} more than once at the gate, expected one curve per job")
    ranked: list[Curve] = []
    listed: list[GateEntry] = []
    verdicts: list[Verdict] = []
    for whole in sorted(curves, key=lambda curve: curve.job_id):
        curve = whole.until(fraction)
        is_there = curve.ended is None and curve.last_step >= curve.step_at(fraction)
        verdict = _earlier_end(curve, judge) if is_there else None
        if is_there and verdict is None:
            ranked.append(curve)
            continue
        if verdict is not None and verdict.state is not JobState.FINISHED:
            verdicts.append(verdict)
        listed.append(_listed(curve, verdict or first_verdict(curve, judge)))
    ranked.sort(key=lambda curve: (loss_at(curve, rank_step(curve)), curve.val_steps[-1], curve.job_id))
    kept = choose(ranked) if ranked else {}
    entries = [
        GateEntry(
            job_id=curve.job_id,
            gate_rank=i + 1,
            val_loss=loss_at(curve, rank_step(curve)),
            kept=curve.job_id in kept,
            reason=kept.get(curve.job_id, "rank"),
        )
        for i, curve in enumerate(ranked)
    ]
    for i, curve in enumerate(ranked):
        if curve.job_id not in kept:
            reason, numbers = why_not(ranked, i, kept) if why_not else _missed_the_top(ranked, i, kept, rank_step)
            reason = f"gate at {100 * fraction:g} % of the budget: {reason}"
            verdicts.append(make_verdict(curve, JobState.UNDERPERFORMING, reason, {**numbers, "fraction": fraction}))
    return GateDecision(entries=(*entries, *listed), verdicts=tuple(sorted(verdicts, key=lambda v: v.job_id)))


def first_verdict(curve: Curve, judge: Judge) -> Verdict | None:
    """The verdict that ends this job when it is judged after each of its evaluations in turn; None when it goes on."""
    verdicts = (judge(part) for part in (*curve.prefixes(), curve))
    return next((verdict for verdict in verdicts if verdict is not None), None)


def num_to_keep(select_ratio: float, num_ranked: int) -> int:
    """`ceil(select_ratio * num_ranked)`, at least 1: the paper's k."""
    # 0.07 * 100 is 7.000000000000001 in binary and must not become 8
    return max(1, math.ceil(select_ratio * num_ranked - 1e-9))


def top(ranked: Sequence[Curve], select_ratio: float) -> dict[str, str]:
    """The best `num_to_keep` of the ranked curves."""
    return {curve.job_id: "top" for curve in ranked[: num_to_keep(select_ratio, len(ranked))]}


def _earlier_end(curve: Curve, judge: Judge) -> Verdict | None:
    """What ended, or must end, a job that reached the gate, without comparing it with others."""
    verdict = first_verdict(curve, judge)
    if verdict is not None:
        return verdict
    if curve.last_val is None:
        return make_verdict(curve, JobState.DIVERGING, "no validation loss was measured before the gate", {})
    if curve.last_step >= curve.total_steps:
        return make_verdict(curve, JobState.FINISHED, "budget spent", {})
    return None


def _listed(curve: Curve, verdict: Verdict | None) -> GateEntry:
    state = curve.ended or (verdict.state if verdict else None)
    loss = curve.last_val
    return GateEntry(
        job_id=curve.job_id,
        gate_rank=None,
        val_loss=loss if loss is not None and math.isfinite(loss) else None,
        kept=False,
        reason=state.value if state else "unknown",
    )


def _missed_the_top(ranked: Sequence[Curve], index: int, kept: Mapping[str, str], rank_step: RankStep) -> Reasoned:
    curve = ranked[index]
    num_top = sum(reason == "top" for reason in kept.values())
    last_top = ranked[num_top - 1]
    at, top_at = rank_step(curve), rank_step(last_top)
    loss, top_loss = loss_at(curve, at), loss_at(last_top, top_at)
    pair = validation_difference(curve, at, last_top, top_at)
    error = f", paired standard error {pair.standard_error:.4f}" if math.isfinite(pair.standard_error) else ""
    when = f" of step {at}" if at != newest(curve) else ""
    reason = (
        f"validation loss {loss:.4f}{when} ranks {index + 1} of {len(ranked)}; the best {num_top} go on, the last "
        f"of them with {top_loss:.4f} (difference {pair.difference:.4f}{error})"
    )
    return reason, {
        "val_loss": loss,
        "gate_rank": index + 1,
        "num_ranked": len(ranked),
        "num_top": num_top,
        "last_top_val_loss": top_loss,
        "difference": pair.difference,
        "standard_error": pair.standard_error,
    }
