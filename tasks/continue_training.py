"""Stage 4: train the survivors to the end of their budgets, past the further rungs of the policy."""

from __future__ import annotations

from alto_core.domain import Stage
from alto_core.training import decide_gate, is_decided, train_until
from alto_core.workspace import Workspace
from tasks.stage import stage


@stage("continue")
def continue_training(task_id: str, revision: str, num_slots: int) -> None:
    """On return every job of the task has ended."""
    workspace = Workspace.open(task_id)
    workspace.begin(Stage.CONTINUE)
    for rung in workspace.gates[1:]:
        if is_decided(workspace, rung) or len(workspace.alive()) > 1:
            train_until(workspace, rung, num_slots=num_slots)
            decide_gate(workspace, rung)
    train_until(workspace, 1.0, num_slots=num_slots)
