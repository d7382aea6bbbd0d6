"""Stage 1: measure the model on this device, or find what was measured before, and decide who trains side by side."""

from __future__ import annotations

from prefect.artifacts import create_markdown_artifact

from alto_core import wording
from alto_core.domain import Stage
from alto_core.preflight import profile_task
from alto_core.workspace import Workspace
from tasks.stage import stage


@stage("profile")
def profile(task_id: str, revision: str, num_devices: int) -> int:
    """Returns the number of slots. With another number of devices the task is profiled anew."""
    workspace = Workspace.open(task_id)
    workspace.begin(Stage.PROFILE)
    measured, expected = profile_task(workspace)
    devices = f"{measured.num_ranks} devices" if measured.num_ranks > 1 else measured.device
    create_markdown_artifact(
        key="profile",
        description=f"Profile of {task_id}",
        markdown=f"**{measured.num_slots} of {len(workspace.jobs)} jobs train side by side** on {devices}, "
        f"{measured.tokens_per_second:.0f} tokens/s, {wording.size(measured.peak_bytes)} with the backbone. "
        f"{wording.forecast(expected)}.",
    )
    return measured.num_slots
