"""What is decided about jobs, with the numbers that were compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from alto_core.domain.states import JobState


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A decision to end one job: outcome, reason, and the numbers that were compared."""

    job_id: str
    state: JobState
    step: int
    reason: str
    """One sentence with the numbers in it, for people."""
    evidence: Mapping[str, float]
    """The numbers compared, by name."""


@dataclass(frozen=True, kw_only=True)
class GateEntry:
    """One job at the warmup gate."""

    job_id: str
    gate_rank: int | None
    """1 is the lowest validation loss; None for a job that had ended before the gate."""
    val_loss: float | None
    """What it was ranked by, or its last one if it had ended before; nats per token, None where that is not finite."""
    kept: bool
    reason: str
    """Why it was kept or ended: `top`, `tie`, `stratum`, `rank`, or the earlier end state."""


@dataclass(frozen=True, kw_only=True)
class GateDecision:
    """Who goes on after the warmup gate, and why."""

    entries: tuple[GateEntry, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def survivors(self) -> tuple[str, ...]:
        return tuple(e.job_id for e in self.entries if e.kept)
