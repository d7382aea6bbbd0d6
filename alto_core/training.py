"""The two moves of a tuning task: train its living jobs to a fraction of their budgets, and decide a gate there."""

from __future__ import annotations

import math
from collections.abc import Sequence

from alto_core import wording
from alto_core.cluster.stop import asked_to_stop
from alto_core.domain import GateDecision
from alto_core.early_exit.policy import Policy
from alto_core.engine.backbone import load_backbone
from alto_core.executor import Executor, JobRun
from alto_core.parking import reserve, thin_to_budget
from alto_core.profiling import leaked_memory
from alto_core.result import GateRecord
from alto_core.scheduling.prediction import expected_savings
from alto_core.store import EventDraft
from alto_core.supervision import Supervisor
from alto_core.tracking import GATE_WAIT_SECONDS, TaskRuns
from alto_core.workspace import Workspace


def train_until(workspace: Workspace, fraction: float, *, num_slots: int) -> tuple[str, ...]:
    """Train every job that has not ended to this share of its own budget.

    A survivor that dies leaves its slot to the best parked job.

    Returns:
        Ids of the jobs that have still not ended.
    """
    stretches = workspace.stretches(workspace.alive(), until=fraction)
    if stretches:
        in_reserve = reserve(workspace, until=fraction)
        train_stretches(workspace, workspace.policy, stretches, num_slots=num_slots, in_reserve=in_reserve)
        _thin(workspace)
    return workspace.alive()


def train_stretches(
    workspace: Workspace,
    policy: Policy,
    stretches: Sequence[JobRun],
    *,
    num_slots: int,
    in_reserve: Sequence[JobRun] = (),
    revived: str = "",
) -> None:
    """Train stretches under a policy's detectors, everything recorded; see `Supervisor.train`.

    Args:
        revived: why jobs that had ended go on; empty for jobs that had not.
    """
    with leaked_memory(load_backbone(workspace.task.model, workspace.device).device) as leaked:
        _train(workspace, policy, stretches, num_slots, in_reserve, revived)
    if leaked[0]:
        text = f"{leaked[0] / 2**20:.0f} MiB are still held after training ended; later tasks will lack them"
        event = EventDraft(kind="warning", text=text, numbers={"leaked_bytes": leaked[0]})
        workspace.store.append_events(workspace.task_id, [event])


def _train(
    workspace: Workspace,
    policy: Policy,
    stretches: Sequence[JobRun],
    num_slots: int,
    in_reserve: Sequence[JobRun],
    revived: str,
) -> None:
    """In a function of its own: when it has returned, nobody refers to the engine."""
    job_ids, spare_ids = ([stretch.job.job_id for stretch in group] for group in (stretches, in_reserve))
    profile = workspace.store.profile(workspace.task_id)
    sizes = {} if profile is None else {"rank_rows": profile.rank_rows, "max_pass_tokens": profile.max_pass_tokens}
    slots = min(num_slots, len(job_ids))
    with (
        workspace.tracked() as runs,
        runs.system_metrics(),
        workspace.engine(job_ids, num_slots=slots, reserve=spare_ids, **sizes) as engine,
    ):
        supervisor = _supervisor(workspace, runs, policy)
        for stretch in stretches if revived else ():
            supervisor.reopen(stretch, revived)
        executor = Executor(
            engine,
            workspace.data,
            data_seed=workspace.task.data.seed,
            step_tokens=(profile and profile.step_tokens) or math.inf,
            asked_to_stop=asked_to_stop(workspace.task_id, workspace.settings),
        )
        supervisor.train(executor, stretches, in_reserve)


def decide_gate(workspace: Workspace, fraction: float) -> GateDecision:
    """Rank the jobs at this share of their budgets, end those that the policy ends, and record the decision."""
    with workspace.tracked() as runs:
        curves = runs.settled_curves(list(workspace.jobs), GATE_WAIT_SECONDS)
        decision = workspace.policy.gate(list(curves.values()), fraction)
        folders = {job_id: workspace.job_folder(job_id) for job_id in workspace.jobs}
        _supervisor(workspace, runs, workspace.policy).apply_gate(fraction, decision, curves, folders)
    _thin(workspace)
    workspace.update_result(gates=(*workspace.result.gates, GateRecord(fraction=fraction, entries=decision.entries)))
    return decision


def _thin(workspace: Workspace) -> None:
    thinned = thin_to_budget(workspace)
    if thinned:
        text = (
            f"{wording.plural(len(thinned), 'parked job')} kept as adapter only, to stay within "
            f"{workspace.task.early_exit.parked_gib:g} GiB (early_exit.parked_gib)"
        )
        workspace.store.append_events(workspace.task_id, [EventDraft(kind="parking", text=text)])


def _supervisor(workspace: Workspace, runs: TaskRuns, policy: Policy) -> Supervisor:
    preset = workspace.task.early_exit.preset
    return Supervisor(
        task_id=workspace.task_id,
        policy=policy,
        runs=runs,
        store=workspace.store,
        decisions=workspace.decisions,
        savings=expected_savings(preset, workspace.store.past_savings(preset)),
    )
