"""Metric histories of many runs in one bulk read, by the fastest way that the tracking store has.

An SQLite file is read directly (one indexed query per series, all of 60 jobs in milliseconds); a server is asked
through the call that MLflow's own pages use; anything else run by run through the client, seconds for 60 jobs.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request, verify_rest_response

from alto_core.errors import TrackingError
from alto_core.tracking.connection import Connection, UnreachableError

INFINITE_FROM = 1e308
"""MLflow's databases keep infinity as the largest float."""

BULK_PATH = "/ajax-api/2.0/mlflow/metrics/get-history-bulk-interval"
MAX_RUNS_PER_REQUEST = 100
MAX_POINTS_PER_RUN = 2500
"""Above this the server leaves points out."""
STEPS_PER_WINDOW = 1000


@dataclass(frozen=True, kw_only=True)
class SeriesRequest:
    """The points of one metric of one run after a step."""

    run_id: str
    key: str
    after_step: int


@dataclass(frozen=True, kw_only=True)
class Point:
    """One logged value. `timestamp` in milliseconds since 1970 tells which of two values of a step is the newer."""

    run_id: str
    key: str
    step: int
    timestamp: int
    value: float


class HistoryReader:
    """Reads points of series. Keeps nothing but which way works.

    Args:
        connection: the way to MLflow.
        is_patient: wait for an MLflow that is away.
    """

    def __init__(self, connection: Connection, *, is_patient: bool = True):
        self._connection = connection
        self._call = connection.call if is_patient else connection.attempt
        self._has_bulk_call = connection.is_server

    def read(self, requests: Sequence[SeriesRequest]) -> list[Point]:
        """All points asked for, NaN and infinite ones as such, in no order; several where a step was logged again.

        Raises:
            TrackingError: MLflow cannot be reached, or a run does not exist.
        """
        if self._connection.database:
            return self._from_sqlite(self._connection.database, requests)
        if self._has_bulk_call:
            return self._from_server(requests)
        return [point for request in requests for point in self._from_client(request)]

    def _from_sqlite(self, database: Path, requests: Iterable[SeriesRequest]) -> list[Point]:
        query = "SELECT step, timestamp, value, is_nan FROM metrics WHERE run_uuid = ? AND key = ? AND step > ?"
        points = []
        try:
            with closing(sqlite3.connect(database, timeout=30)) as connection:
                connection.execute("PRAGMA query_only=1")
                for r in requests:
                    rows = connection.execute(query, (r.run_id, r.key, r.after_step))
                    points += [
                        _point(r.run_id, r.key, step, at, math.nan if nan else value) for step, at, value, nan in rows
                    ]
        except sqlite3.Error as error:
            kind = UnreachableError if isinstance(error, sqlite3.OperationalError) else TrackingError
            raise kind(
                f"could not read curves from {database}: {error}. Check the disk, then resume the task."
            ) from error
        return points

    def _from_server(self, requests: Iterable[SeriesRequest]) -> list[Point]:
        """One request per metric and 100 runs; runs that stand at similar steps go together."""
        points: list[Point] = []
        by_key: dict[str, list[SeriesRequest]] = {}
        for request in sorted(requests, key=lambda r: r.after_step):
            by_key.setdefault(request.key, []).append(request)
        for key, series in by_key.items():
            for start in range(0, len(series), MAX_RUNS_PER_REQUEST):
                points += self._chunk_from_server(key, series[start : start + MAX_RUNS_PER_REQUEST])
        return points

    def _chunk_from_server(self, key: str, series: Sequence[SeriesRequest]) -> Iterator[Point]:
        after = {request.run_id: request.after_step for request in series}
        first = min(after.values()) + 1
        points = self._bulk_call(key, list(after), first, 2**31 - 1)
        counts: dict[str, int] = {}
        for point in points:
            counts[point.run_id] = counts.get(point.run_id, 0) + 1
        cut = {run_id for run_id, count in counts.items() if count >= MAX_POINTS_PER_RUN}
        whole = [point for point in points if point.run_id not in cut]
        for run_id in cut:
            whole += self._in_windows(key, run_id, first, max(p.step for p in points if p.run_id == run_id))
        return (point for point in whole if point.step > after[point.run_id])

    def _in_windows(self, key: str, run_id: str, first: int, last: int) -> Iterator[Point]:
        for start in range(first, last + 1, STEPS_PER_WINDOW):
            points = self._bulk_call(key, [run_id], start, start + STEPS_PER_WINDOW - 1)
            if len(points) >= MAX_POINTS_PER_RUN:  # logged more than twice: only the slow call is sure to have all
                yield from self._from_client(SeriesRequest(run_id=run_id, key=key, after_step=start - 1))
                return
            yield from points

    def _bulk_call(self, key: str, run_ids: Sequence[str], first: int, last: int) -> list[Point]:
        params: dict[str, Any] = {
            "run_ids": run_ids,
            "metric_key": key,
            "start_step": first,
            "end_step": last,
            "max_results": MAX_POINTS_PER_RUN,
        }
        return self._call("read curves", self._request_points, params)

    def _request_points(self, params: dict[str, Any]) -> list[Point]:
        response = http_request(get_default_host_creds(self._connection.uri), BULK_PATH, "GET", params=params)
        if response.status_code == 404 and "RESOURCE_DOES_NOT_EXIST" not in response.text:
            self._has_bulk_call = False
            requests = [
                SeriesRequest(run_id=r, key=params["metric_key"], after_step=params["start_step"] - 1)
                for r in params["run_ids"]
            ]
            return [point for request in requests for point in self._from_client(request)]
        metrics = verify_rest_response(response, BULK_PATH).json().get("metrics", [])
        return [
            _point(m["run_id"], m["key"], int(m.get("step", 0)), int(m["timestamp"]), float(m["value"]))
            for m in metrics
        ]

    def _from_client(self, request: SeriesRequest) -> Iterator[Point]:
        history = self._call("read curves", self._connection.client.get_metric_history, request.run_id, request.key)
        for metric in history:
            if metric.step > request.after_step:
                yield _point(request.run_id, request.key, metric.step, metric.timestamp, metric.value)


def _point(run_id: str, key: str, step: int, timestamp: int, value: float) -> Point:
    if abs(value) >= INFINITE_FROM:
        value = math.copysign(math.inf, value)
    return Point(run_id=run_id, key=key, step=step, timestamp=timestamp, value=value)
