"""A task goes on where a run that died, failed or was cancelled had left it.

What such a run leaves: rows and jobs of the task, a decision log that is ahead of everything, curves in MLflow, states
of jobs, and cuts that name the states which belong together.
"""

from __future__ import annotations

from collections.abc import Sequence

from alto_core.cuts import Cut, Place, Session
from alto_core.domain import JobState, TaskState
from alto_core.earlier_run import EarlierRun
from alto_core.job_run import JobRun
from alto_core.parking import reserve
from alto_core.store import EventDraft
from alto_core.supervision import Supervisor, spent_verdict
from alto_core.tracking import TaskRuns
from alto_core.workspace import Workspace


def take_up(workspace: Workspace) -> None:
    """Make a task that was begun before ready to go on; one that was not is left alone.

    The caller holds the task alone, so a task that is said to run has lost its process.
    """
    record = workspace.store.task(workspace.task_id)
    if not workspace.was_begun or record.state is TaskState.FINISHED:
        return
    if record.state in (TaskState.FAILED, TaskState.CANCELLED):
        exits = workspace.decisions.last_exits().values()
        alone = {entry.job_id for entry in exits if entry.state is JobState.CANCELLED}  # a person ended these: final
        cancelled = [job_id for job_id in workspace.ended_as(JobState.CANCELLED) if job_id not in alone]
        workspace.store.reset_task(workspace.task_id, job_ids=cancelled)
    workspace.rewind()
    with workspace.tracked() as runs:
        runs.open_again(workspace.alive())
    text = f"goes on from its last checkpoint; it was {record.state} in stage {record.stage or 'none'}"
    workspace.store.append_events(workspace.task_id, [EventDraft(kind="resumed", text=text)])


def open_cut(workspace: Workspace, until: float) -> Cut | None:
    """Where the stretch of training to this share of the budgets goes on: its last cut, or its beginning.

    Returns:
        None: there is nothing to train, or a later stretch has begun already.
    """
    cut, faults = workspace.cuts.newest_whole(workspace.states_of)
    workspace.store.append_events(workspace.task_id, [EventDraft(kind="warning", text=fault) for fault in faults])
    if cut is not None and cut.session.until >= until:
        return cut if cut.session.until == until else None
    stretches = workspace.stretches(workspace.alive(), until=until)
    if not stretches:
        return None
    session = Session(
        until=until,
        job_ids=tuple(stretch.job.job_id for stretch in stretches),
        reserve=_places(reserve(workspace, until=until)),
    )
    first = Cut(session=session, places=_places(stretches))
    workspace.cuts.write(first)
    return first


def runs_of(workspace: Workspace, cut: Cut) -> tuple[JobRun, ...]:
    """What the executor trains from a cut on, in its order."""
    return tuple(
        workspace.stretch(place.job_id, start_step=place.step, until=cut.session.until, rank_start=place.rank_start)
        for place in cut.places
    )


def reserve_of(workspace: Workspace, cut: Cut) -> tuple[JobRun, ...]:
    """Parked jobs that had not taken a slot by the time of a cut, the best first."""
    return tuple(
        workspace.stretch(place.job_id, start_step=place.step, until=cut.session.until)
        for place in cut.session.reserve
        if place.job_id not in cut.joined
    )


def settle(workspace: Workspace, cut: Cut, earlier: EarlierRun, runs: TaskRuns, supervisor: Supervisor) -> None:
    """Record the ends of jobs that had left their slots before the cut, where that had not been done yet.

    Such a job was ended by a verdict, which the decision log holds; or it has spent its budget; or it only waits for
    the end of the stretch. What a gate decided is the gate's to record.
    """
    session, left = cut.session, {*cut.session.job_ids, *cut.joined} - {place.job_id for place in cut.places}
    open_jobs = [job_id for job_id in workspace.alive() if job_id in left]
    curves = runs.read_curves(open_jobs) if open_jobs else {}
    for job_id in open_jobs:
        curve, budget = curves[job_id], workspace.budgets[job_id]
        if job_id in earlier.exits:
            supervisor.end(workspace.job_folder(job_id), curve, earlier.exits[job_id].verdict)
        elif budget.step_at(session.until) == budget.total_steps:
            spent = spent_verdict(job_id, budget.total_steps, curve.val_losses[-1])
            supervisor.decide([spent], curves)
            supervisor.end(workspace.job_folder(job_id), curve, spent)


def _places(stretches: Sequence[JobRun]) -> tuple[Place, ...]:
    return tuple(Place(job_id=stretch.job.job_id, step=stretch.start_step) for stretch in stretches)
