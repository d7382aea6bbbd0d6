"""What tasks had logged and MLflow never got, because it was away or their process died: delivered late."""

from __future__ import annotations

from alto_core.cluster.recovery import Finding
from alto_core.settings import Settings
from alto_core.tracking import deliver_left_behind


def deliver_leftovers(settings: Settings) -> tuple[Finding, ...]:
    """Deliver what waits in the spools of all tasks, and say for which ones.

    Raises:
        TrackingError: the embedded database cannot be used.
    """
    return tuple(
        Finding(text=f"task {left.task_id}: {left.text}", task_id=left.task_id)
        for left in deliver_left_behind(settings)
    )
