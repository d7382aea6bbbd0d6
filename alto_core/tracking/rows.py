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
from alto_core.whole_files import whole_file

FOLDER = "val_rows"


class RowLossArchive:
    """The row losses of one task: written by one process, read by any.

    Args:
        connection: the way to MLflow.
        parent_run_id: the task's run.
        folder: where files wait for MLflow; they stay there as long as the task's folder.
        is_patient: wait for an MLflow that is away.
    """

    def __init__(self, connection: Connection, parent_run_id: str, folder: Path, *, is_patient: bool = True):
        self._connection = connection
        self._call = connection.call if is_patient else connection.attempt
        self._run_id = parent_run_id
        self._folder = folder
        self._artifact_uri = ""
        self._unwritten: tuple[Evaluation, ...] = ()
        self._read: set[str] = set()
        self._losses: dict[str, dict[int, RowLosses]] = {}

    @property
    def losses(self) -> Mapping[str, Mapping[int, RowLosses]]:
        """All that were read or written here, by job and step."""
        return self._losses

    def write(self, evaluations: Sequence[Evaluation], timestamp: int) -> Path | None:
        """Write a file that is to become an artifact of the task's run; later ones have later timestamps.

        Returns:
            The file; None where the disk took nothing: the next call writes these evaluations too.
        """
        for evaluation in evaluations:
            self._losses.setdefault(evaluation.job_id, {})[evaluation.step] = evaluation.row_losses
        self._unwritten += tuple(evaluations)
        file = self._folder / f"{timestamp:015d}.parquet"
        try:
            with whole_file(file, flush=False) as fresh:
                pq.write_table(_table(self._unwritten), fresh, compression="zstd")
        except OSError:
            return None
        self._unwritten = ()
        self._read.add(file.name)
        return file

    def fetch(self) -> None:
        """Read the files in MLflow that came since the last call.

        Raises:
            TrackingError: MLflow did not give them.
        """
        for path in self._call("list the row losses", self._list):
            if path not in self._read:
                with tempfile.TemporaryDirectory() as folder:
                    self._take(Path(self._call(f"read {path}", self._download, path, folder)))

    def fetch_waiting(self) -> None:
        """Read the files on this disk that came since the last call."""
        for file in sorted(self._folder.glob("*.parquet")):
            if file.name not in self._read:
                self._take(file)

    def _take(self, file: Path) -> None:
        for job_id, step, losses in _evaluations(pq.read_table(file)):
            self._losses.setdefault(job_id, {})[step] = losses
        self._read.add(file.name)

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
