"""Stage 6: put the winner into the model registry."""

from __future__ import annotations

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.events import emit_event

from alto_core.domain import Stage
from alto_core.registration import register_winner, result_links
from alto_core.report import job_rows, leaderboard
from alto_core.tracking import CHALLENGER
from alto_core.workspace import Workspace
from tasks.stage import stage


@stage("register")
def register(task_id: str, revision: str, winner: str) -> str:
    """Returns `name/version` of the registered model."""
    workspace = Workspace.open(task_id)
    workspace.begin(Stage.REGISTER)
    registered = register_winner(workspace, winner)
    links = result_links(workspace)
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
        f"**{registered.version}** ({', '.join(registered.aliases)}).\n\n"
        + "\n".join(f"- [{name}]({url})" for name, url in links.items())
        + f"\n\nThe report is also in the file `{workspace.report_file.name}` of the task's folder. With the embedded "
        "MLflow the links work while `alto ui` runs.",
    )
    for name in ("report", "run"):
        create_link_artifact(key=f"mlflow-{name}", link=links[name], description=f"{name.capitalize()} of {task_id}")
    if CHALLENGER in registered.aliases:
        # what the deployment `promote` waits for
        emit_event(
            event="alto.challenger.registered",
            resource={"prefect.resource.id": f"alto.model.{registered.name}", "alto.model.name": registered.name},
            payload={"version": registered.version, "task_id": task_id},
        )
    return f"{registered.name}/{registered.version}"
