"""The curves of a task, from MLflow into a curve file."""

from __future__ import annotations

from pathlib import Path

from alto_core.curve_files import CurveRows, write_recording
from alto_core.errors import DataError
from alto_core.workspace import Workspace


def export_curves(workspace: Workspace, file: Path) -> int:
    """Write the curves of all jobs that measured anything, and their row losses beside them.

    Returns:
        How many jobs were written.

    Raises:
        StoreError: there is no such task.
        TrackingError: the curves cannot be read.
        DataError: the file's name does not end in `.parquet`.
    """
    if file.suffix != ".parquet":
        raise DataError(f"{file}: expected a name that ends in .parquet")
    jobs = workspace.jobs
    with workspace.tracked() as runs:
        curves = [curve for curve in runs.read_curves(list(jobs)).values() if curve.last_step]
    write_recording(
        file,
        [
            CurveRows(
                curve=curve,
                lora_rank=jobs[curve.job_id].lora_rank,
                adapter_batch_size=jobs[curve.job_id].rows_per_update,
            )
            for curve in curves
        ],
    )
    return len(curves)
