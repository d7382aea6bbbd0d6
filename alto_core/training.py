"""The two moves of a tuning task: train its living jobs to a fraction of their budgets, and decide a gate there."""

from __future__ import annotations

import math
from collections.abc import Sequence

from alto_core.domain import GateDecision
from alto_core.engine.backbone import load_backbone
from alto_core.executor import Executor, JobRun
from alto_core.profiling import leaked_memory
from alto_core.result import GateRecord
from alto_core.scheduling.prediction import expected_savings
from alto_core.store import EventDraft
from alto_core.supervision import Supervisor
from alto_core.tracking import TaskRuns
from alto_core.workspace import Workspace


def train_until(workspace: Workspace, fraction: float, *, num_slots: int) -> tuple[str, ...]:
    """Train every job that has not ended to this share of its own budget.

    Returns:
        Ids of the jobs that have still not ended.
    """
    stretches = workspace.stretches(workspace.alive(), until=fraction)
    if stretches:
        with leaked_memory(load_backbone(workspace.task.model, workspace.device).device) as leaked:
            _train(workspace, stretches, num_slots)
        if leaked[0]:
            text = f"{leaked[0] / 2**20:.0f} MiB are still held after training ended; later tasks will lack them"
            event = EventDraft(kind="warning", text=text, numbers={"leaked_bytes": leaked[0]})
            workspace.store.append_events(workspace.task_id, [event])
    return workspace.alive()


def _train(workspace: Workspace, stretches: Sequence[JobRun], num_slots: int) -> None:
    """In a function of its own: when it has returned, nobody refers to the engine."""
    job_ids = [stretch.job.job_id for stretch in stretches]
    profile = workspace.store.profile(workspace.task_id)
    sizes = {} if profile is None else {"rank_rows": profile.rank_rows, "max_pass_tokens": profile.max_pass_tokens}
    slots = min(num_slots, len(job_ids))
    with workspace.tracked() as runs, workspace.engine(job_ids, num_slots=slots, **sizes) as engine:
        executor = Executor(
            engine,
            workspace.data,
            data_seed=workspace.task.data.seed,
            step_tokens=(profile and profile.step_tokens) or math.inf,
        )
        _supervisor(workspace, runs).train(executor, stretches)


def decide_gate(workspace: Workspace, fraction: float) -> GateDecision:
    """Rank the jobs at this share of their budgets, end those that the policy ends, and record the decision."""
    with workspace.tracked() as runs:
        curves = runs.read_curves(list(workspace.jobs))
        decision = workspace.policy.gate(list(curves.values()), fraction)
        folders = {job_id: workspace.job_folder(job_id) for job_id in workspace.jobs}
        _supervisor(workspace, runs).apply_gate(decision, curves, folders)
    workspace.update_result(gates=(*workspace.result.gates, GateRecord(fraction=fraction, entries=decision.entries)))
    return decision


def _supervisor(workspace: Workspace, runs: TaskRuns) -> Supervisor:
    preset = workspace.task.early_exit.preset
    return Supervisor(
        task_id=workspace.task_id,
        policy=workspace.policy,
        runs=runs,
        store=workspace.store,
        savings=expected_savings(preset, workspace.store.past_savings(preset)),
    )
