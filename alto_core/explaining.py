"""Why a job stopped, and how the others stood at that moment. Reads decision log and curves; decides nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from alto_core.decision_log import ExitLogEntry, GateLogEntry
from alto_core.domain import GateEntry
from alto_core.early_exit.curves import Curve
from alto_core.store import JobRecord
from alto_core.workspace import Workspace

NUM_BESIDE = 2
"""Jobs shown on each side of the one explained."""


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """One job at the moment of another's end, at the same share of its own budget."""

    job_id: str
    place: int
    """1 is the lowest validation loss there."""
    val_loss: float
    kept: bool | None
    """What the gate decided about it; None where the end was not at a gate."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A job, its ends, and its surroundings at the last of them."""

    record: JobRecord
    exits: tuple[ExitLogEntry, ...]
    """In order; several for a job that was revived."""
    fraction: float | None
    """Share of the budget at which it is compared with others; None for a job that has measured nothing."""
    num_compared: int
    neighbours: tuple[Neighbour, ...]
    """The best job there, and those next to this one, this one among them, by place."""
    curve: Curve
    best_curve: Curve | None
    """Of the best neighbour, when that is another job."""
    gates: tuple[float, ...]
    """Gates held, as shares of the budget."""

    @property
    def last_exit(self) -> ExitLogEntry | None:
        return self.exits[-1] if self.exits else None


def explain(workspace: Workspace, job_id: str) -> Explanation:
    """Explain one job as it stands.

    Raises:
        StoreError: there is no such task.
        TrackingError: the curves cannot be read.
    """
    record = workspace.records()[job_id]
    log = workspace.decisions.read()
    exits = tuple(entry for entry in log if isinstance(entry, ExitLogEntry) and entry.job_id == job_id)
    gates = [entry for entry in log if isinstance(entry, GateLogEntry)]
    with workspace.tracked() as runs:
        curves = runs.read_curves(list(workspace.jobs))
    last = exits[-1] if exits else None
    fraction = None if not record.step else min(1.0, record.step / record.total_steps)
    compared: list[Neighbour] = []
    if last is not None and last.gate_fraction is not None:
        fraction = last.gate_fraction
        held = [gate for gate in gates if math.isclose(gate.fraction, fraction)]
        compared = _at_gate(held[-1].entries) if held else []
    elif fraction is not None:
        compared = _at_fraction(list(curves.values()), fraction)
    best = curves[compared[0].job_id] if compared and compared[0].job_id != job_id else None
    return Explanation(
        record=record,
        exits=exits,
        fraction=fraction,
        num_compared=len(compared),
        neighbours=_beside(compared, job_id),
        curve=curves[job_id],
        best_curve=best,
        gates=tuple(dict.fromkeys(gate.fraction for gate in gates)),
    )


def _at_gate(entries: Sequence[GateEntry]) -> list[Neighbour]:
    return [
        Neighbour(job_id=e.job_id, place=e.gate_rank, val_loss=e.val_loss, kept=e.kept)
        for e in entries
        if e.gate_rank is not None and e.val_loss is not None
    ]


def _at_fraction(curves: Sequence[Curve], fraction: float) -> list[Neighbour]:
    """Jobs that came that far, by their last validation loss up to there."""
    there = []
    for curve in curves:
        loss = curve.until(fraction).last_val
        if loss is not None and math.isfinite(loss) and curve.last_step >= curve.step_at(fraction):
            there.append((loss, curve.job_id))
    return [
        Neighbour(job_id=job_id, place=place, val_loss=loss, kept=None)
        for place, (loss, job_id) in enumerate(sorted(there), start=1)
    ]


def _beside(compared: Sequence[Neighbour], job_id: str) -> tuple[Neighbour, ...]:
    at = next((i for i, neighbour in enumerate(compared) if neighbour.job_id == job_id), None)
    if at is None:
        return tuple(compared[: 1 + NUM_BESIDE])
    first = max(0, at - NUM_BESIDE)
    return (*compared[: min(1, first)], *compared[first : at + NUM_BESIDE + 1])
