"""Which points an earlier run of a task has logged, so that the run that goes on after it logs none of them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mlflow.entities import Metric

from alto_core.tracking.history import HistoryReader, SeriesRequest

Series = tuple[str, str]
"""MLflow run and metric."""


class PointsThere:
    """Reads a series when something is logged to it for the first time, and keeps its steps.

    Args:
        reader: of MLflow.
        flush: makes what was logged before readable.
    """

    def __init__(self, reader: HistoryReader, flush: Callable[[], None]):
        self._reader, self._flush = reader, flush
        self._steps: dict[Series, set[int]] = {}

    def without(self, metrics: Mapping[str, Sequence[Metric]]) -> dict[str, list[Metric]]:
        """The metrics, by run, whose step is not there yet. From now on they count as there.

        Raises:
            TrackingError: MLflow cannot be read.
        """
        self._read({(run_id, metric.key) for run_id, of_run in metrics.items() for metric in of_run})
        new: dict[str, list[Metric]] = {}
        for run_id, of_run in metrics.items():
            for metric in of_run:
                steps = self._steps[run_id, metric.key]
                if metric.step not in steps:
                    steps.add(metric.step)
                    new.setdefault(run_id, []).append(metric)
        return new

    def _read(self, series: set[Series]) -> None:
        unknown = [one for one in series if one not in self._steps]
        if not unknown:
            return
        self._flush()
        self._steps |= {one: set() for one in unknown}
        requests = [SeriesRequest(run_id=run_id, key=key, after_step=-1) for run_id, key in unknown]
        for point in self._reader.read(requests):
            self._steps[point.run_id, point.key].add(point.step)
