"""Where a job stood after a step, from what MLflow holds of it: for a job whose first steps are not in the spool."""

from __future__ import annotations

from collections.abc import Mapping

from alto_core.early_exit.curves import smoothed
from alto_core.tracking.history import HistoryReader, SeriesRequest
from alto_core.tracking.logbook import TOKENS, Progress
from alto_core.tracking.messages import TRAIN_LOSS
from alto_core.tracking.series import Series


def read_progress(reader: HistoryReader, last_steps: Mapping[str, int], alpha: float) -> dict[str, Progress]:
    """What builds on all steps of a job, by run id.

    Args:
        reader: the way to MLflow.
        last_steps: the step after which, by run id.
        alpha: weight of the newest loss in the smoothed train loss.

    Raises:
        TrackingError: MLflow cannot be read.
    """
    requests = [
        SeriesRequest(run_id=run_id, key=key, after_step=0) for run_id in last_steps for key in (TRAIN_LOSS, TOKENS)
    ]
    series = {(request.run_id, request.key): Series() for request in requests}
    for point in reader.read(requests):
        series[point.run_id, point.key].add(point.step, point.timestamp, point.value)
    progress = {}
    for run_id, last in last_steps.items():
        _, losses = series[run_id, TRAIN_LOSS].through(last)
        _, tokens = series[run_id, TOKENS].through(last)
        ema = smoothed(losses, alpha)
        progress[run_id] = Progress(
            step=last, ema=ema[-1] if ema else None, tokens=int(tokens[-1]) if tokens else 0, learning_rate=0.0
        )
    return progress
