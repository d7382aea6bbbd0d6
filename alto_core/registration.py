"""The winner's way into the model registry, adapter only and with tags that link it; and the report of the task."""

from __future__ import annotations

from pathlib import Path

from alto_core.engine.model_files import declared_name
from alto_core.report import build_report
from alto_core.result import RegisteredVersion
from alto_core.store import EventDraft
from alto_core.workspace import Workspace


def register_winner(workspace: Workspace, winner: str) -> RegisteredVersion:
    """Register the winner's best adapter as a new version of the task's registered model.

    Raises:
        TrackingError: the registry refused it, or what was written could not be read back.
    """
    adapter_folder = workspace.job_folder(winner) / "adapter"
    with workspace.tracked() as runs:
        version = runs.register(
            name=workspace.task.registered_model,
            job_id=winner,
            adapter_folder=adapter_folder,
            tags=_tags(workspace, winner),
        )
    registered = RegisteredVersion(name=version.name, version=version.version, aliases=version.aliases)
    workspace.update_result(registered=registered, adapter_folder=str(adapter_folder))
    workspace.store.set_task_fields(
        workspace.task_id, registered_name=registered.name, registered_version=registered.version
    )
    workspace.store.append_events(
        workspace.task_id, [EventDraft(kind="registered", job_id=winner, text=str(registered))]
    )
    return registered


def publish_report(workspace: Workspace) -> Path:
    """Write the report of a task that has ended, and put a copy beside its curves in MLflow."""
    report = build_report(workspace.task_id, workspace.settings, workspace.report_file)
    workspace.store.set_task_fields(workspace.task_id, report_path=str(report))
    with workspace.tracked() as runs:
        runs.log_artifact(report)
    return report


def _tags(workspace: Workspace, winner: str) -> dict[str, str]:
    tags = {
        "alto.task_id": workspace.task_id,
        "alto.job_id": winner,
        "alto.data_digest": workspace.data.digest,
        "alto.base_model": declared_name(workspace.task.model),
        "alto.base_revision": workspace.task.model.revision or "",
    }
    for score in workspace.result.scores:
        if score.job_id in (winner, None):
            whose = score.split if score.job_id else f"untuned_{score.split}"
            tags[f"alto.{whose}_loss"] = f"{score.loss:.6f}"
            if score.metric_value:
                tags[f"alto.{whose}_{score.metric}"] = str(score.metric_value)
    return tags
