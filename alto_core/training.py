"""The two moves of a tuning task: train its living jobs to a fraction of their budgets, and decide a gate there.

Both can be made again: what an earlier run of the task had done is found, and not done twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from alto_core import wording
from alto_core.checkpointing import Checkpointer
from alto_core.cluster.stop import asked_to_stop
from alto_core.cuts import Cut, Session
from alto_core.domain import GateDecision
from alto_core.earlier_run import EarlierRun, earlier_run
from alto_core.early_exit.policy import Policy
from alto_core.executor import Executor
from alto_core.job_run import JobRun
from alto_core.parking import thin_to_budget
from alto_core.profiling import allocated_bytes, leaked_memory
from alto_core.result import GateRecord
from alto_core.resuming import open_cut, reserve_of, runs_of, settle
from alto_core.savings import savings_of
from alto_core.store import EventDraft
from alto_core.supervision import Supervisor
from alto_core.task_engine import open_engine
from alto_core.tracking import GATE_WAIT_SECONDS, TaskRuns
from alto_core.workspace import Workspace


def train_until(workspace: Workspace, fraction: float, *, num_slots: int) -> tuple[str, ...]:
    """Train every job that has not ended to this share of its own budget.

    A survivor that dies leaves its slot to the best parked job. Where a run that died was at it, its last cut is gone
    on from; a stretch that lies behind is over.

    Returns:
        Ids of the jobs that have still not ended.
    """
    cut = open_cut(workspace, fraction)
    if cut is not None:
        _train_from(workspace, cut, num_slots)
        _thin(workspace)
    return workspace.alive()


def train_stretches(
    workspace: Workspace, policy: Policy, stretches: Sequence[JobRun], *, num_slots: int, revived: str
) -> None:
    """Let jobs that had ended go on under a policy's detectors, everything recorded; see `Supervisor.train`.

    No cut is written, so that an interrupted revival leaves the jobs as they were.

    Args:
        revived: the reason.
    """
    session = Session(until=1.0, job_ids=tuple(stretch.job.job_id for stretch in stretches))
    _train(workspace, _Training(policy=policy, session=session, stretches=stretches, revived=revived), num_slots)


@dataclass(frozen=True, kw_only=True)
class _Training:
    """What is trained, and what is known of it."""

    policy: Policy
    session: Session
    stretches: Sequence[JobRun]
    reserve: Sequence[JobRun] = ()
    earlier: EarlierRun = field(default_factory=EarlierRun)
    checkpoints: Checkpointer = field(default_factory=Checkpointer)
    revived: str = ""
    """Why jobs that had ended go on; empty for jobs that had not."""


def _train_from(workspace: Workspace, cut: Cut, num_slots: int) -> None:
    """Train what a cut names, and record the ends of jobs that had left their slots before it."""
    stretches, in_reserve = runs_of(workspace, cut), reserve_of(workspace, cut)
    earlier = EarlierRun()
    if workspace.was_begun:
        events = workspace.store.events(workspace.task_id)
        earlier = earlier_run(workspace.decisions, workspace.records(), events, [*stretches, *in_reserve])
        with workspace.tracked() as runs:
            settle(workspace, cut, earlier, runs, _supervisor(workspace, runs, workspace.policy, earlier))
    if stretches:
        training = _Training(
            policy=workspace.policy,
            session=cut.session,
            stretches=stretches,
            reserve=in_reserve,
            earlier=earlier,
            checkpoints=Checkpointer(workspace.cuts, begun=cut, interval_seconds=workspace.settings.checkpoint_seconds),
        )
        _train(workspace, training, num_slots)


def _train(workspace: Workspace, training: _Training, num_slots: int) -> None:
    with leaked_memory(partial(allocated_bytes, torch.device(workspace.device))) as leaked:
        _train_in_slots(workspace, training, num_slots)
    held = training.checkpoints.held_seconds
    text = f"training waited {held:.2f} s for checkpoints"
    events = [EventDraft(kind="checkpoint", text=text, numbers={"seconds": held})]
    if leaked[0]:
        text = f"{leaked[0] / 2**20:.0f} MiB are still held after training ended; later tasks will lack them"
        events.append(EventDraft(kind="warning", text=text, numbers={"leaked_bytes": leaked[0]}))
    workspace.store.append_events(workspace.task_id, events)


def _train_in_slots(workspace: Workspace, training: _Training, num_slots: int) -> None:
    """In a function of its own: when it has returned, nobody refers to the engine."""
    session = training.session
    profile = workspace.store.profile(workspace.task_id)
    sizes = {} if profile is None else {"rank_rows": profile.rank_rows, "max_pass_tokens": profile.max_pass_tokens}
    # of the whole session: room for the jobs of a later cut alone would let others in than an unbroken run does
    slots = min(num_slots, len(session.job_ids))
    with (
        workspace.tracked() as runs,
        runs.system_metrics(),
        open_engine(workspace, session.job_ids, num_slots=slots, reserve=session.reserve_ids, **sizes) as engine,
    ):
        supervisor = _supervisor(workspace, runs, training.policy, training.earlier)
        for stretch in training.stretches if training.revived else ():
            supervisor.reopen(stretch, training.revived)
        executor = Executor(
            engine,
            workspace.data,
            data_seed=workspace.task.data.seed,
            step_tokens=(profile and profile.step_tokens) or math.inf,
            asked_to_stop=asked_to_stop(workspace.task_id, workspace.settings),
            checkpoints=training.checkpoints,
            session=session,
        )
        supervisor.train(executor, training.stretches, training.reserve)


def decide_gate(workspace: Workspace, fraction: float) -> GateDecision:
    """Rank the jobs at this share of their budgets, end those that the policy ends, and record the decision.

    A gate that was held by an earlier run stays as it was decided; what had not come of it yet does.
    """
    held = workspace.decisions.gate_at(fraction)
    if held is not None and any(math.isclose(gate.fraction, fraction) for gate in workspace.result.gates):
        return held
    earlier = EarlierRun()
    if workspace.was_begun:
        earlier = earlier_run(workspace.decisions, workspace.records(), (), ())
    with workspace.tracked() as runs:
        curves = runs.settled_curves(list(workspace.jobs), GATE_WAIT_SECONDS)
        decision = held or workspace.policy.gate(list(curves.values()), fraction)
        folders = {job_id: workspace.job_folder(job_id) for job_id in workspace.jobs}
        _supervisor(workspace, runs, workspace.policy, earlier).apply_gate(fraction, decision, curves, folders)
    _thin(workspace)
    workspace.update_result(gates=(*workspace.result.gates, GateRecord(fraction=fraction, entries=decision.entries)))
    return decision


def is_decided(workspace: Workspace, fraction: float) -> bool:
    """Whether the gate at this share was held, if only half recorded."""
    return workspace.decisions.gate_at(fraction) is not None


def _thin(workspace: Workspace) -> None:
    thinned = thin_to_budget(workspace)
    if thinned:
        text = (
            f"{wording.plural(len(thinned), 'parked job')} kept as adapter only, to stay within "
            f"{workspace.task.early_exit.parked_gib:g} GiB (early_exit.parked_gib)"
        )
        workspace.store.append_events(workspace.task_id, [EventDraft(kind="parking", text=text)])


def _supervisor(workspace: Workspace, runs: TaskRuns, policy: Policy, earlier: EarlierRun) -> Supervisor:
    return Supervisor(
        task_id=workspace.task_id,
        policy=policy,
        runs=runs,
        store=workspace.store,
        decisions=workspace.decisions,
        savings=savings_of(workspace.task.early_exit.preset, workspace.store),
        earlier=earlier,
    )
