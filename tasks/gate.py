"""Stage 3: rank what reached the gate and end the rest."""

from __future__ import annotations

from prefect.artifacts import create_table_artifact

from alto_core.domain import Stage
from alto_core.training import decide_gate
from alto_core.workspace import Workspace
from tasks.stage import stage


@stage("gate")
def gate(task_id: str, revision: str) -> list[str]:
    """Returns the ids of the survivors."""
    workspace = Workspace.open(task_id)
    workspace.begin(Stage.GATE)
    decision = decide_gate(workspace, workspace.task.budget.gate_warmup_fraction)
    create_table_artifact(
        key="gate",
        description=f"Warmup gate of {task_id}",
        table=[
            {
                "gate_rank": entry.gate_rank,
                "job_id": entry.job_id,
                "val_loss": entry.val_loss,
                "kept": entry.kept,
                "reason": entry.reason,
            }
            for entry in decision.entries
        ],
    )
    return list(decision.survivors)
