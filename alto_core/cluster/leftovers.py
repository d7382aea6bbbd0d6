"""What tasks had logged and MLflow never got, because it was away or their process died: delivered late."""

from __future__ import annotations

from alto_core.cluster.recovery import Finding
from alto_core.settings import Settings


def deliver_leftovers(settings: Settings) -> tuple[Finding, ...]:
    """Deliver what waits in the spools of all tasks, and say for which ones.

    Raises:
        TrackingError: the embedded database cannot be used.
    """
    from alto_core.tracking import deliver_left_behind  # here, because it takes MLflow: the scheduler does without

    return tuple(
        Finding(text=f"task {left.task_id}: {left.text}", task_id=left.task_id)
        for left in deliver_left_behind(settings)
    )
