"""What MLflow shows per optimizer step, smoothed loss and token count included, which build on the steps before."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlflow.entities import Metric

from alto_core.domain import StepRecord
from alto_core.early_exit.curves import smoothed
from alto_core.tracking.history import HistoryReader, SeriesRequest
from alto_core.tracking.series import TRAIN_LOSS, Series

TOKENS = "tokens"


@dataclass(frozen=True, kw_only=True)
class _Progress:
    """Where a job stands."""

    step: int
    ema: float | None
    """Smoothed train loss after that step; None before the first."""
    tokens: int
    """Tokens of all steps so far."""


class RunningSums:
    """Turns step records into metrics.

    Args:
        reader: reads what was logged before, where a job does not go on where it stood.
        alpha: weight of the newest loss in the smoothed train loss.
    """

    def __init__(self, reader: HistoryReader, alpha: float):
        self._reader = reader
        self._alpha = alpha
        self._progress: dict[str, _Progress] = {}

    def metrics(
        self, records: Sequence[StepRecord], run_ids: Mapping[str, str], flush: Callable[[], None]
    ) -> dict[str, list[Metric]]:
        """The metrics of steps, by job id.

        Args:
            records: those of a job one after the other.
            run_ids: MLflow runs by job id.
            flush: makes what was logged before readable; called where a job was resumed, or went back.

        Raises:
            TrackingError: such a job's history cannot be read.
        """
        unknown: dict[str, int] = {}
        for job_id, step in {r.job_id: r.step for r in reversed(records)}.items():
            if step == 1:
                self._progress[job_id] = _Progress(step=0, ema=None, tokens=0)
            elif job_id not in self._progress or step != self._progress[job_id].step + 1:
                unknown[job_id] = step
        if unknown:
            flush()
            self._read_progress(unknown, run_ids)
        found: dict[str, list[Metric]] = {}
        now = now_ms()
        for r in records:
            found.setdefault(r.job_id, []).extend(self._of_step(r, now))
        return found

    def _of_step(self, r: StepRecord, now: int) -> list[Metric]:
        before = self._progress[r.job_id]
        ema = r.train_loss if before.ema is None else self._alpha * r.train_loss + (1 - self._alpha) * before.ema
        tokens = before.tokens + r.num_tokens
        self._progress[r.job_id] = _Progress(step=r.step, ema=ema, tokens=tokens)
        values = {
            TRAIN_LOSS: r.train_loss,
            "train_loss_ema": ema,
            "learning_rate": r.learning_rate,
            "grad_norm": r.grad_norm,
            TOKENS: float(tokens),
            **r.measures,
        }
        return [Metric(key, value, now, r.step) for key, value in values.items()]

    def _read_progress(self, next_steps: Mapping[str, int], run_ids: Mapping[str, str]) -> None:
        requests = [
            SeriesRequest(run_id=run_ids[job_id], key=key, after_step=0)
            for job_id in next_steps
            for key in (TRAIN_LOSS, TOKENS)
        ]
        series = {(request.run_id, request.key): Series() for request in requests}
        for point in self._reader.read(requests):
            series[point.run_id, point.key].add(point.step, point.timestamp, point.value)
        for job_id, step in next_steps.items():
            _, losses = series[run_ids[job_id], TRAIN_LOSS].through(step - 1)
            _, tokens = series[run_ids[job_id], TOKENS].through(step - 1)
            ema = smoothed(losses, self._alpha)
            self._progress[job_id] = _Progress(
                step=step - 1, ema=ema[-1] if ema else None, tokens=int(tokens[-1]) if tokens else 0
            )


def now_ms() -> int:
    """Milliseconds since 1970, as MLflow counts."""
    return int(time.time() * 1000)
