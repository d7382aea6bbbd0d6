"""A stretch of one job's training, what an executor is given to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from alto_core.domain import JobBudget, LoraJob


@dataclass(frozen=True, kw_only=True)
class JobRun:
    """A stretch of one job's training: from where it stands to a step of its budget."""

    job: LoraJob
    budget: JobBudget
    folder: Path
    """Holds `state` (to continue from) and `adapter` (the best so far, in PEFT format)."""
    start_step: int
    """Updates already made; above 0 the job is restored from `folder/state`."""
    target_step: int
    """The stretch ends after this update."""
    init_adapter: Path | None = None
    rank_start: int | None = None
    """First of its rank rows where it held a slot before; None: it waits for one."""
