"""Stage 2: train every candidate to the gate; the detectors are at work already."""

from __future__ import annotations

from alto_core.domain import Stage
from alto_core.training import train_until
from alto_core.workspace import Workspace
from tasks.stage import stage


@stage("warmup")
def warmup(task_id: str, revision: str, num_slots: int) -> list[str]:
    """Returns the ids of the jobs that reached the gate."""
    workspace = Workspace.open(task_id)
    workspace.begin(Stage.WARMUP)
    return list(train_until(workspace, workspace.task.budget.gate_warmup_fraction, num_slots=num_slots))
