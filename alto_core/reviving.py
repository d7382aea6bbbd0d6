"""A job that ended early goes on to the end of its budget: same executor, same store row, same MLflow run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from alto_core.domain import JobState
from alto_core.early_exit import NonePolicy
from alto_core.errors import StoreError
from alto_core.outcomes import Score
from alto_core.parking import require_parked
from alto_core.selection import jobs_that_may_win, pick_winner, score_jobs
from alto_core.store import JobRecord, JobUpdate
from alto_core.task_lock import held
from alto_core.training import train_stretches
from alto_core.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class RevivedJob:
    """What came of a revived job."""

    before: JobRecord
    after: JobRecord
    score: Score | None
    """On the validation rows; None when the job left no adapter that may win."""
    winner_score: Score | None
    """Of the task's winner, on the same rows."""
    beats_the_winner: bool
    """Whether this job would have won, by the rule that picked the winner."""


def revive_job(workspace: Workspace, job_id: str) -> RevivedJob:
    """Train a parked job of an ended task to the end of its budget and score it beside the winner.

    Nothing but a loss that is no number ends it again. The registered winner stays as it is.

    Raises:
        StoreError: the task has not ended, another process is at work on it, the job cannot go on, or it is the winner.
    """
    with at_work_on(workspace):
        require_parked(workspace, [job_id])
        if job_id == workspace.result.winner:
            raise StoreError(
                f"job {job_id} of task {workspace.task_id} is the winner, expected another job: training on would "
                "replace the adapter that was evaluated and registered. Give it more steps in a task of its own."
            )
        before = workspace.records()[job_id]
        stretches = workspace.stretches([job_id], until=1.0)
        if not stretches:
            raise StoreError(f"job {job_id} of task {workspace.task_id}: its budget of {before.step} steps is spent")
        try:
            train_stretches(workspace, NonePolicy(), stretches, num_slots=1, revived="revived by a person")
        except BaseException:
            _put_back(workspace, before)
            raise
        return _score(workspace, before)


@contextmanager
def at_work_on(workspace: Workspace) -> Iterator[None]:
    """Hold an ended task alone.

    Raises:
        StoreError: the task has not ended, or another process holds it.
    """
    state = workspace.store.task(workspace.task_id).state
    if not state.is_end:
        raise StoreError(
            f"task {workspace.task_id}: got a {state} task, expected one that has ended. Wait for its end."
        )
    with held(workspace.task_id, workspace.folder):
        for record in workspace.records().values():
            if record.state is JobState.RUNNING:  # whoever revived it was killed
                _put_back(workspace, _as_it_ended(workspace, record))
        yield


def _as_it_ended(workspace: Workspace, record: JobRecord) -> JobRecord:
    """A job as it was before it was revived."""
    last = [entry for entry in workspace.decisions.exits_of(record.job_id) if entry.state.is_end][-1]
    return replace(record, state=last.state, step=last.step, reason=last.reason)


def _put_back(workspace: Workspace, before: JobRecord) -> None:
    """An interrupted revival leaves the job as it was: its state on disk is still that of `before.step`."""
    if workspace.records()[before.job_id].state is not JobState.RUNNING:
        return
    update = JobUpdate(job_id=before.job_id, state=before.state, reason=before.reason, step=before.step)
    workspace.store.update_jobs(workspace.task_id, [update])
    with workspace.tracked() as runs:
        runs.set_job_state(before.job_id, before.state, reason=before.reason)


def _score(workspace: Workspace, before: JobRecord) -> RevivedJob:
    job_id, result = before.job_id, workspace.result
    after = workspace.records()[job_id]
    winner_score = result.score(result.winner, "validation")
    if job_id not in jobs_that_may_win(workspace):
        return RevivedJob(before=before, after=after, score=None, winner_score=winner_score, beats_the_winner=False)
    (score,) = score_jobs(workspace, workspace.data.validation, [job_id], num_slots=1)
    others = tuple(s for s in result.scores if (s.job_id, s.split) != (job_id, "validation"))
    workspace.update_result(scores=(*others, score))
    with workspace.tracked() as runs:
        runs.log_scores([score])
    pair = [score] if winner_score is None else [winner_score, score]
    return RevivedJob(
        before=before,
        after=after,
        score=score,
        winner_score=winner_score,
        beats_the_winner=pick_winner(pair, workspace.task.evaluation.choose_by) == job_id,
    )
