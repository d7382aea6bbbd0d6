"""The winner's way into the model registry, adapter only and with tags that link it; and the report of the task."""

from __future__ import annotations

from pathlib import Path

from alto_core import wording
from alto_core.data.rows import SplitData
from alto_core.engine.model_files import declared_name
from alto_core.evaluation import held_out_digest
from alto_core.report import build_report
from alto_core.result import RegisteredVersion
from alto_core.store import EventDraft
from alto_core.tracking import OWNER, ServingFacts, fingerprint, links
from alto_core.workspace import Workspace


def register_winner(workspace: Workspace, winner: str) -> RegisteredVersion:
    """Register the winner's best adapter as a new version of the task's registered model, once for each task.

    Raises:
        TrackingError: the registry refused it, or what was written could not be read back.
    """
    there = workspace.result.registered
    if there is not None:
        return there
    adapter_folder = workspace.job_folder(winner) / "adapter"
    facts = serving_facts(workspace)
    with workspace.tracked() as runs:
        version = runs.register(
            name=workspace.task.registered_model,
            job_id=winner,
            adapter_folder=adapter_folder,
            tags=_tags(workspace, winner, facts),
            facts=facts,
        )
    registered = RegisteredVersion(name=version.name, version=version.version, aliases=version.aliases)
    workspace.store.set_task_fields(
        workspace.task_id, registered_name=registered.name, registered_version=registered.version
    )
    workspace.store.append_events(
        workspace.task_id, [EventDraft(kind="registered", job_id=winner, text=str(registered))]
    )
    workspace.update_result(registered=registered, adapter_folder=str(adapter_folder))
    return registered


def result_links(workspace: Workspace) -> dict[str, str]:
    """Where MLflow shows what came out of a task, by what it is."""
    base = links.ui_url(workspace.settings)
    with workspace.tracked() as runs:
        experiment, parent, jobs = runs.experiment_id, runs.parent_run_id, list(runs.job_run_ids.values())
    found = {
        "report": links.artifact_url(base, experiment, parent, workspace.report_file.name),
        "run": links.run_url(base, experiment, parent),
        "jobs compared": links.compare_url(base, experiment, jobs),
    }
    if registered := workspace.result.registered:
        found["registered model"] = links.model_url(base, registered.name)
    return found


def publish_report(workspace: Workspace) -> Path:
    """Write the report of a task that has ended, and put a copy beside its curves in MLflow."""
    report = build_report(workspace.task_id, workspace.settings, workspace.report_file)
    workspace.store.set_task_fields(workspace.task_id, report_path=str(report))
    with workspace.tracked() as runs:
        runs.log_artifact(report)
    return report


def held_out(workspace: Workspace) -> SplitData:
    """The rows that adapters of different tasks are compared on: the test rows, or the validation rows without any."""
    return workspace.data.test or workspace.data.validation


def serving_facts(workspace: Workspace) -> ServingFacts:
    """What answering with the task's adapters takes."""
    model, data = workspace.task.model, workspace.data
    folder = Path(model.name)
    prompts = held_out(workspace).generation_rows
    return ServingFacts(
        base_model=declared_name(model),
        base_revision=model.revision,
        base_fingerprint=fingerprint(folder) if folder.is_dir() else None,
        stop_token_ids=data.stop_token_ids,
        pad_token_id=data.pad_token_id,
        max_new_tokens=workspace.task.evaluation.max_new_tokens,
        example_prompt=workspace.codec.spell(prompts[0].prompt_ids) if prompts else "",
    )


def _tags(workspace: Workspace, winner: str, facts: ServingFacts) -> dict[str, str]:
    tags = {
        OWNER: workspace.task.owner,
        "alto.task_id": workspace.task_id,
        "alto.job_id": winner,
        "alto.data_digest": workspace.data.digest,
        "alto.held_out_digest": held_out_digest(held_out(workspace), workspace.data.stop_token_ids),
        "alto.base_model": facts.base_model,
        "alto.base_revision": facts.base_revision or "",
        "alto.base_fingerprint": facts.base_fingerprint or "",
        "alto.check_losses": ",".join(f"{loss:.6f}" for loss in workspace.result.check_losses),
        "alto.code_version": wording.alto_version(),
    }
    for score in workspace.result.scores:
        if score.job_id in (winner, None):
            whose = score.split if score.job_id else f"untuned_{score.split}"
            tags[f"alto.{whose}_loss"] = f"{score.loss:.6f}"
            if score.metric_value:
                tags[f"alto.{whose}_{score.metric}"] = str(score.metric_value)
    return tags
