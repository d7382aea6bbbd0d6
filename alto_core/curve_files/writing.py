"""Curves into the two Parquet files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from alto_core.curve_files.reading import rows_file
from alto_core.early_exit.curves import Curve
from alto_core.whole_files import whole_file

COMPACT_BITS = 12
"""Bits of a row loss's significand that a compact file keeps: an error below 1/4000, far below any standard error."""


@dataclass(frozen=True, kw_only=True)
class CurveRows:
    """One job as it goes into a curve file."""

    curve: Curve
    lora_rank: int
    adapter_batch_size: int
    """Rows of one optimizer step."""


def write_recording(path: Path, jobs: Sequence[CurveRows], *, compact: bool = False) -> None:
    """Write a curve file, and beside it the row losses where curves have any.

    A measured loss that is no number is written as infinity: NaN in a curve file means that nothing was measured.

    Args:
        path: ends in `.parquet`.
        jobs: the curves.
        compact: losses in single precision and row losses rounded to `COMPACT_BITS`, for files that are kept.
    """
    real = pa.float32() if compact else pa.float64()
    lines = [line for job in jobs for line in _lines(job)]
    columns = list(zip(*lines, strict=True)) or [()] * 8
    table = {
        "job_id": pa.array(columns[0], pa.string()).dictionary_encode(),
        "learning_rate": pa.array(columns[1], pa.float64()),
        "lora_rank": pa.array(columns[2], pa.int32()),
        "adapter_batch_size": pa.array(columns[3], pa.int32()),
        "step": pa.array(columns[4], pa.int32()),
        "fraction": pa.array(columns[5], real),
        "train_loss": pa.array(columns[6], real),
        "val_loss": pa.array(columns[7], real),
    }
    _write(path, table, split=["train_loss", "val_loss"])
    beside = rows_file(path)
    evaluations = [(job.curve.job_id, step, rows) for job in jobs for step, rows in job.curve.row_losses.items()]
    if not evaluations:
        beside.unlink(missing_ok=True)
        return
    counts = [len(rows.loss_sums) for _, _, rows in evaluations]
    sums = np.concatenate([np.array(rows.loss_sums) for _, _, rows in evaluations])
    row_table = {
        "job_id": pa.array(np.repeat([job_id for job_id, _, _ in evaluations], counts)).dictionary_encode(),
        "step": np.repeat(np.array([step for _, step, _ in evaluations], dtype=np.int32), counts),
        "row": np.concatenate([np.arange(count, dtype=np.int32) for count in counts]),
        "loss_sum": pa.array(_rounded(sums) if compact else sums, real),
        "num_tokens": np.concatenate([np.array(rows.num_labels, dtype=np.int32) for _, _, rows in evaluations]),
    }
    _write(beside, row_table, split=["loss_sum"])


def _lines(job: CurveRows) -> Iterator[tuple[Any, ...]]:
    """One line per step at which anything was measured."""
    curve = job.curve
    train = dict(zip(curve.train_steps, curve.train_losses, strict=True))
    val = dict(zip(curve.val_steps, curve.val_losses, strict=True))
    for step in sorted({*train, *val}):
        yield (
            curve.job_id,
            curve.learning_rate,
            job.lora_rank,
            job.adapter_batch_size,
            step,
            step / curve.total_steps,
            _measured(train.get(step)),
            _measured(val.get(step)),
        )


def _measured(loss: float | None) -> float:
    if loss is None:
        return math.nan
    return math.inf if math.isnan(loss) else loss


def _rounded(values: np.ndarray) -> np.ndarray:
    """To `COMPACT_BITS` of the significand, so that the file compresses."""
    significands, exponents = np.frexp(values)
    return np.ldexp(np.round(significands * 2**COMPACT_BITS) / 2**COMPACT_BITS, exponents)


def _write(path: Path, columns: dict[str, Any], *, split: list[str]) -> None:
    """Bytes of floats are stored by place, which compresses best."""
    encoded = [name for name in columns if name not in split]
    with whole_file(path) as partial:
        pq.write_table(
            pa.table(columns),
            partial,
            compression="zstd",
            compression_level=12,
            use_dictionary=encoded,
            column_encoding=dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
        )
