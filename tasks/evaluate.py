"""Stage 5: score the finished adapters on validation rows, pick the winner, score it on the test rows once."""

from __future__ import annotations

from prefect.artifacts import create_table_artifact

from alto_core.domain import Stage
from alto_core.selection import evaluate_task
from alto_core.workspace import Workspace
from tasks.stage import stage


@stage("evaluate")
def evaluate(task_id: str, revision: str, num_slots: int) -> str:
    """Returns the winner's job id."""
    workspace = Workspace.open(task_id)
    workspace.begin(Stage.EVALUATE)
    winner, scores = evaluate_task(workspace, num_slots=num_slots)
    create_table_artifact(
        key="scores",
        description=f"Scores of {task_id}",
        table=[
            {
                "job": score.job_id or "untuned model",
                "split": score.split,
                "loss": score.loss,
                score.metric or "metric": str(score.metric_value) if score.metric_value else None,
            }
            for score in scores
        ],
    )
    return winner
