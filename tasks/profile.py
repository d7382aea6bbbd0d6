"""Stage 1: measure a step and decide how many jobs train side by side."""

from __future__ import annotations

from prefect.artifacts import create_markdown_artifact

from alto_core.domain import Stage
from alto_core.engine.backbone import load_backbone
from alto_core.profiling import profile_task
from alto_core.workspace import Workspace
from tasks.stage import stage


@stage("profile")
def profile(task_id: str, revision: str) -> int:
    """Returns the number of slots."""
    workspace = Workspace.open(task_id)
    workspace.begin(Stage.PROFILE)
    measured = profile_task(
        load_backbone(workspace.task.model, workspace.device),
        list(workspace.jobs.values()),
        workspace.data,
        data_seed=workspace.task.data.seed,
        max_slots=workspace.task.max_slots,
    )
    workspace.store.save_profile(task_id, measured)
    create_markdown_artifact(
        key="profile",
        description=f"Profile of {task_id}",
        markdown=f"**{measured.num_slots} of {len(workspace.jobs)} jobs train side by side** on {measured.device}, "
        f"{measured.tokens_per_second:.0f} tokens/s, {measured.peak_bytes / 2**30:.2f} GiB above the backbone.",
    )
    return measured.num_slots
