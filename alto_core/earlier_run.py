"""What a run that died had decided and written down, so that the one after it does neither again.

Jobs that train together share the passes of every step. A run that goes on from a cut therefore trains the jobs again
that ended after the cut, up to the step of their end, beside the others; what was recorded of them stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from alto_core.decision_log import DecisionLog, ExitLogEntry
from alto_core.domain import JobState, Verdict
from alto_core.job_run import JobRun
from alto_core.store import EventRecord, JobRecord


@dataclass(frozen=True, kw_only=True)
class EarlierRun:
    """Nothing, where no run was at work before."""

    exits: Mapping[str, ExitLogEntry] = field(default_factory=dict)
    """How jobs ended behind where they now go on, by job id; decided, perhaps not yet recorded everywhere. No gates."""
    recorded: frozenset[str] = frozenset()
    """Jobs whose end is recorded everywhere."""
    evaluated: Mapping[str, int] = field(default_factory=dict)
    """Last step whose evaluation is among the events, by job id."""

    def verdict_at(self, job_id: str, step: int) -> Verdict | None:
        """The verdict that ended a job at this step. A job that had spent its budget needs none."""
        entry = self.exits.get(job_id)
        if entry is None or step < entry.step or entry.state is JobState.FINISHED:
            return None
        return entry.verdict


def earlier_run(
    decisions: DecisionLog, records: Mapping[str, JobRecord], events: Sequence[EventRecord], runs: Sequence[JobRun]
) -> EarlierRun:
    """Put together what is known.

    Args:
        decisions: the task's log.
        records: of all its jobs.
        events: the task's.
        runs: where jobs go on.
    """
    starts = {run.job.job_id: run.start_step for run in runs}
    exits = {
        job_id: entry
        for job_id, entry in decisions.last_exits().items()
        if entry.gate_fraction is None and entry.step > starts.get(job_id, -1)
    }
    evaluated: dict[str, int] = {}
    for event in events:
        if event.kind == "evaluation" and event.job_id is not None:
            evaluated[event.job_id] = max(evaluated.get(event.job_id, 0), int(event.numbers["step"]))
    return EarlierRun(
        exits=exits,
        recorded=frozenset(job_id for job_id, record in records.items() if record.state.is_end),
        evaluated=evaluated,
    )
