"""The two moves of a tuning task: train its living jobs to a fraction of their budgets, and decide a gate there."""

from __future__ import annotations

from alto_core.cluster.stop import asked_to_stop
from alto_core.domain import GateDecision
from alto_core.executor import Executor
from alto_core.result import GateRecord
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
        job_ids = [stretch.job.job_id for stretch in stretches]
        with workspace.tracked() as runs, workspace.engine(job_ids, num_slots=min(num_slots, len(job_ids))) as engine:
            executor = Executor(
                engine,
                workspace.data,
                data_seed=workspace.task.data.seed,
                asked_to_stop=asked_to_stop(workspace.task_id, workspace.settings),
            )
            _supervisor(workspace, runs).train(executor, stretches)
    return workspace.alive()


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
    return Supervisor(task_id=workspace.task_id, policy=workspace.policy, runs=runs, store=workspace.store)
