"""What a process must know of a task's MLflow runs to log them, noted beside the task for when MLflow is away."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alto_core.domain import JobState
from alto_core.tracking.description import STATE, TrackedJob
from alto_core.tracking.messages import Tags
from alto_core.tracking.spool import Spool
from alto_core.whole_files import whole_file

FILE_NAME = "runs.json"


@dataclass(frozen=True, kw_only=True)
class KnownRuns:
    """The runs of one task, as MLflow had them when they were last asked for."""

    experiment_id: str
    parent_run_id: str
    ema_alpha: float
    jobs: tuple[TrackedJob, ...]


def note_runs(folder: Path, runs: KnownRuns) -> None:
    """Write them down in the folder of the task's spool."""
    with whole_file(folder / FILE_NAME) as file:
        file.write_text(json.dumps(dataclasses.asdict(runs), indent=1), encoding="utf-8")


def noted_runs(folder: Path) -> KnownRuns | None:
    """What was written down; None where nothing was."""
    file = folder / FILE_NAME
    if not file.exists():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    jobs = tuple(TrackedJob(**{**job, "state": JobState(job["state"])}) for job in content.pop("jobs"))
    return KnownRuns(**content, jobs=jobs)


def with_spooled_states(jobs: Sequence[TrackedJob], spool: Spool, start: int) -> list[TrackedJob]:
    """The jobs in the states that the spool has them in from an offset on, whether MLflow knows or not."""
    by_run = {job.run_id: job for job in jobs}
    for line in spool.lines(start):
        if isinstance(line.message, Tags) and STATE in line.message.tags and line.message.run_id in by_run:
            state = JobState(line.message.tags[STATE])
            by_run[line.message.run_id] = dataclasses.replace(by_run[line.message.run_id], state=state)
    return list(by_run.values())
