"""Validation losses row by row as Parquet artifacts of the task's run, one file per boundary.

They are what paired standard errors are computed from. The columns are `job_id, step, row, loss_sum, num_tokens`: one
line per validation row, the rows of one evaluation together and in order. Later files win where two hold the same
evaluation, as after a resume.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from mlflow.artifacts import download_artifacts, list_artifacts

from alto_core.domain import Evaluation, RowLosses
from alto_core.tracking.connection import Connection

FOLDER = "val_rows"


class RowLossArchive:
    """The row losses of one task: written by one process, read by any."""

    def __init__(self, connection: Connection, parent_run_id: str):
        self._connection = connection
        self._run_id = parent_run_id
        self._artifact_uri = ""
        self._next_number: int | None = None
        self._read: set[str] = set()
        self._losses: dict[str, dict[int, RowLosses]] = {}

    def write(self, evaluations: Sequence[Evaluation]) -> None:
        """Add one file. Repeating the call after a failure writes the same file again."""
        if self._next_number is None:
            self._next_number = max((int(Path(name).stem) for name in self._list()), default=0) + 1
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{self._next_number:06d}.parquet"
            pq.write_table(_table(evaluations), file, compression="zstd")
            self._connection.client.log_artifact(self._run_id, str(file), FOLDER)
        self._next_number += 1

    def read(self) -> Mapping[str, Mapping[int, RowLosses]]:
        """All row losses by job and step. Only files that came since the last call are fetched.

        Raises:
            TrackingError: MLflow did not give them.
        """
        for path in self._connection.call("list the row losses", self._list):
            if path in self._read:
                continue
            with tempfile.TemporaryDirectory() as folder:
                local = self._connection.call(f"read {path}", self._download, path, folder)
                try:
                    table = pq.read_table(local)
                except pa.ArrowInvalid:
                    continue  # still being written, or its writer was killed; the evaluations will be in a later one
                for job_id, step, losses in _evaluations(table):
                    self._losses.setdefault(job_id, {})[step] = losses
            self._read.add(path)
        return self._losses

    def _list(self) -> list[str]:
        uri, tracking_uri = self._root(), self._connection.uri
        return sorted(
            PurePosixPath(item.path).name for item in list_artifacts(f"{uri}/{FOLDER}", tracking_uri=tracking_uri) or ()
        )

    def _download(self, path: str, folder: str) -> str:
        uri = f"{self._root()}/{FOLDER}/{path}"
        return str(download_artifacts(uri, dst_path=folder, tracking_uri=self._connection.uri))

    def _root(self) -> str:
        """Artifact address of the run; the client's own calls look it up each time, which costs more than reading."""
        if not self._artifact_uri:
            self._artifact_uri = self._connection.client.get_run(self._run_id).info.artifact_uri
        return self._artifact_uri


def _table(evaluations: Sequence[Evaluation]) -> pa.Table:
    counts = [len(evaluation.row_losses.loss_sums) for evaluation in evaluations]
    return pa.table(
        {
            "job_id": pa.array(np.repeat([e.job_id for e in evaluations], counts)).dictionary_encode(),
            "step": np.repeat(np.array([e.step for e in evaluations], dtype=np.int32), counts),
            "row": np.concatenate([np.arange(count, dtype=np.int32) for count in counts]),
            "loss_sum": np.concatenate([np.array(e.row_losses.loss_sums, dtype=np.float64) for e in evaluations]),
            "num_tokens": np.concatenate([np.array(e.row_losses.num_labels, dtype=np.int32) for e in evaluations]),
        }
    )


def _evaluations(table: pa.Table) -> list[tuple[str, int, RowLosses]]:
    rows = table["row"].to_numpy()
    starts = np.flatnonzero(rows == 0)
    stops = [*starts[1:], len(rows)]
    job_ids, steps = table["job_id"], table["step"].to_numpy()
    sums, tokens = table["loss_sum"].to_numpy(), table["num_tokens"].to_numpy()
    return [
        (
            job_ids[int(start)].as_py(),
            int(steps[start]),
            RowLosses(loss_sums=tuple(sums[start:stop].tolist()), num_labels=tuple(tokens[start:stop].tolist())),
        )
        for start, stop in zip(starts, stops, strict=True)
    ]
