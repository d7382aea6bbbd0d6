"""The curves of one task's jobs, read: from MLflow, and from the spool what MLflow does not have yet.

A process that logs reads a job's curve from MLflow once. From then on it knows what it logs itself, and its side thread
tells what MLflow holds of that after each delivery, so that reading waits for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

from alto_core.domain import CurveSource, Evaluation
from alto_core.early_exit.curves import Curve
from alto_core.errors import TrackingError
from alto_core.tracking.connection import UnreachableError
from alto_core.tracking.description import TrackedJob
from alto_core.tracking.history import HistoryReader
from alto_core.tracking.messages import Message
from alto_core.tracking.rows import RowLossArchive
from alto_core.tracking.series import CurveCache
from alto_core.tracking.spool import Spool


class TaskCurves:
    """Safe to use from several threads.

    Args:
        spool: the task's spool.
        reader: reads MLflow's histories.
        rows: the task's row losses.
    """

    def __init__(self, spool: Spool, reader: HistoryReader, rows: RowLossArchive):
        self._spool, self._reader, self._rows = spool, reader, rows
        self._lock = threading.RLock()
        self._cache = CurveCache()
        self._loaded: set[str] = set()
        """Runs whose curves were read once."""
        self._is_writer = False

    def note_steps(self, run_id: str, last_step: int) -> None:
        """Say that this process logs the steps of a job up to this one."""
        with self._lock:
            self._cache.note_step(run_id, last_step)

    def note_evaluation(self, run_id: str, evaluation: Evaluation) -> bool:
        """Say that this process logs an evaluation; whether its row losses are new."""
        with self._lock:
            if not self._is_writer:
                self._rows.fetch_waiting()
            self._cache.note_evaluation(run_id, evaluation.step)
            return self._rows.losses.get(evaluation.job_id, {}).get(evaluation.step) != evaluation.row_losses

    def add(self, messages: Iterable[Message]) -> None:
        """Take in what this process logs."""
        with self._lock:
            self._is_writer = True
            for message in messages:
                self._cache.add_spooled(message)

    def read(self, jobs: Sequence[TrackedJob], *, is_away: bool) -> dict[str, Curve]:
        """The curves by job id.

        Args:
            jobs: whose.
            is_away: MLflow is known to be away; the spool is read instead of waiting.

        Raises:
            TrackingError: MLflow cannot be read, and the spool is empty.
        """
        with self._lock:
            stale = {job.run_id for job in jobs if not (self._is_writer and job.run_id in self._loaded)}
        if stale:
            self._load(stale, is_away=is_away)
        with self._lock:
            losses = self._rows.losses
            return {job.job_id: self._cache.curve(job, losses.get(job.job_id, {})) for job in jobs}

    def source(self, run_id: str) -> CurveSource:
        """Where the curve of a run comes from."""
        with self._lock:
            return CurveSource.MLFLOW if self._cache.is_read(run_id) else CurveSource.SPOOL

    def read_back(self, run_ids: Collection[str]) -> None:
        """See what MLflow holds of curves that it has just got points of."""
        with self._lock:
            requests = self._cache.requests(self._loaded.intersection(run_ids))
        with suppress(TrackingError):  # the spooled points stand; `source` tells
            points = self._reader.read(requests)
            with self._lock:
                self._cache.add_read(points)

    def _load(self, run_ids: Collection[str], *, is_away: bool) -> None:
        start = self._spool.cursor
        try:
            if is_away and self._spool.end:
                raise UnreachableError("MLflow is away")
            with self._lock:
                requests = self._cache.requests(run_ids)
            points = self._reader.read(requests)
            self._rows.fetch()
        except UnreachableError:
            if not self._spool.end:
                raise
            points, start = [], 0
        with self._lock:
            self._cache.add_read(points)
            for line in self._spool.lines(start):
                if line.message is not None and line.message.run_id in run_ids:
                    self._cache.add_spooled(line.message)
            self._rows.fetch_waiting()
            self._loaded.update(run_ids)
