"""Stage 6: put the winner into the model registry."""

from __future__ import annotations

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from alto_core.domain import Stage
from alto_core.registration import register_winner
from alto_core.report import job_rows, leaderboard
from alto_core.workspace import Workspace
from tasks.stage import stage


@stage("register")
def register(task_id: str, revision: str, winner: str) -> str:
    """Returns `name/version` of the registered model."""
    workspace = Workspace.open(task_id)
    workspace.begin(Stage.REGISTER)
    registered = register_winner(workspace, winner)
    jobs = job_rows(workspace.store.jobs(task_id))
    create_table_artifact(
        key="leaderboard",
        description=f"Leaderboard of {task_id}",
        table=[line.as_dict() for line in leaderboard(jobs, workspace.result)],
    )
    create_markdown_artifact(
        key="summary",
        description=f"Summary of {task_id}",
        markdown=f"# {task_id}\n\nWinner **{winner}**, registered as **{registered.name}** version "
        f"**{registered.version}** ({', '.join(registered.aliases)}).\n\nThe report is `report.html` in the task's "
        "folder and among the artifacts of the task's MLflow run.",
    )
    return f"{registered.name}/{registered.version}"
