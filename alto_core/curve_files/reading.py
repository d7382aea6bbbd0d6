"""Curve files into `Curve`s: sorted, merged, placed on each job's own budget.

`fraction` says where a row stands. Where steps run in proportion to it, a curve keeps the file's own steps; where they
do not (a count of evaluations, say), it is laid out in millionths of the budget, and a note says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from alto_core.curve_files.columns import ColumnFile
from alto_core.curve_files.rows import read_row_losses
from alto_core.domain import RowLosses
from alto_core.early_exit.curves import Curve
from alto_core.errors import DataError

COLUMNS = (
    "job_id", "learning_rate", "lora_rank", "adapter_batch_size", "step", "fraction", "train_loss", "val_loss",
)  # fmt: skip
FINE_STEPS = 1_000_000
"""Positions of a budget on which rows are placed whose steps do not run in proportion to it."""
ROUNDING = 1e-6
"""Fractions above 1 by no more than this are 1: half of a float32's last digit."""


@dataclass(frozen=True, kw_only=True)
class RecordedJob:
    """One job of a curve file."""

    curve: Curve
    """All of it, without an end state."""
    lora_rank: int
    adapter_batch_size: int
    total_steps: float
    """Steps of the whole budget, by the file's own count of steps."""
    file_steps: Mapping[int, int] | None = None
    """From the curve's steps to the file's, where they differ."""

    @property
    def job_id(self) -> str:
        return self.curve.job_id

    @property
    def planned_samples(self) -> float:
        """Rows that the whole budget trains on."""
        return self.total_steps * self.adapter_batch_size

    def step_in_file(self, step: int) -> int:
        """The file's own number of a step of the curve; of the last recorded row up to it where none is there."""
        if self.file_steps is None:
            return step
        return max((own for position, own in self.file_steps.items() if position <= step), default=0)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The jobs of one curve file."""

    path: Path
    jobs: tuple[RecordedJob, ...]
    """In the order in which they come in the file."""
    notes: tuple[str, ...] = ()
    """What was taken otherwise than it stands there; one sentence each."""

    @property
    def curves(self) -> tuple[Curve, ...]:
        return tuple(job.curve for job in self.jobs)


def read_recording(path: Path) -> Recording:
    """Read a curve file and, if it is there, the file of row losses beside it.

    Raises:
        DataError: a file cannot be read, lacks a column, or holds a value that cannot be meant; names the file, the
            column and the row.
    """
    file = ColumnFile(path, COLUMNS)
    if len(file) == 0:
        raise DataError(f"{path}: got no rows, expected at least one job with a validation loss.")
    table = _Table(file)
    row_file = rows_file(path)
    row_losses: Mapping[str, Mapping[int, RowLosses]] = {}
    notes: list[str] = []
    if row_file.exists():
        row_losses, row_notes = read_row_losses(row_file)
        notes += row_notes
        unknown = sorted(set(row_losses) - set(table.job_ids))
        if unknown:
            notes.append(f"{row_file.name} holds {len(unknown)} jobs that {path.name} has not, such as {unknown[0]}")
    jobs = tuple(
        table.job(job_id, np.array(rows), row_losses.get(job_id, {}), notes) for job_id, rows in table.rows_of.items()
    )
    return Recording(path=path, jobs=jobs, notes=tuple(notes))


def rows_file(path: Path) -> Path:
    """Where the row losses of a curve file lie: `sweep.parquet` has `sweep.rows.parquet`."""
    return path.with_suffix(".rows.parquet") if path.suffix else path.with_name(f"{path.name}.rows.parquet")


class _Table:
    """The checked columns, and which rows belong to which job."""

    def __init__(self, file: ColumnFile):
        self.file = file
        self.job_ids = file.text("job_id")
        self.learning_rates = file.numbers("learning_rate")
        self.lora_ranks = file.whole_numbers("lora_rank", at_least=1)
        self.batch_sizes = file.whole_numbers("adapter_batch_size", at_least=1)
        self.steps = file.whole_numbers("step", at_least=0)
        self.fractions = file.numbers("fraction")
        self.train = file.numbers("train_loss", missing_as_nan=True)
        self.val = file.numbers("val_loss", missing_as_nan=True)
        self._check(~np.isfinite(self.learning_rates) | (self.learning_rates < 0), "learning_rate", "0 or more")
        self._check(~((self.fractions >= 0) & (self.fractions <= 1 + ROUNDING)), "fraction", "a share in [0, 1]")
        self.fractions = np.minimum(self.fractions, 1.0)
        self.rows_of: dict[str, list[int]] = {}
        for row, job_id in enumerate(self.job_ids):
            self.rows_of.setdefault(job_id, []).append(row)

    def job(self, job_id: str, rows: np.ndarray, losses: Mapping[int, RowLosses], notes: list[str]) -> RecordedJob:
        rows = rows[np.argsort(self.steps[rows], kind="stable")]
        self._check_same("lora_rank", self.lora_ranks, rows)
        self._check_same("adapter_batch_size", self.batch_sizes, rows)
        rates = self.learning_rates[rows]
        if rates.min() != rates.max():
            notes.append(f"{job_id}: its learning rate changes; the highest, {rates.max():g}, is taken as its own")
        train, val = self._merged("train_loss", self.train, rows), self._merged("val_loss", self.val, rows)
        positions, total, total_in_file = self._positions(rows)
        if positions is not None:
            notes.append(f"{job_id}: its steps do not run in proportion to `fraction`; `fraction` is taken")
        if not val:
            # never measured is as good as never finite: such a job must not be ranked
            val = dict.fromkeys((int(step) for step in self.steps[rows]), math.nan)
        at = positions or {int(step): int(step) for step in self.steps[rows]}
        curve = Curve(
            job_id=job_id,
            learning_rate=float(rates.max()),
            total_steps=total,
            warmup_steps=1,
            train_steps=tuple(at[step] for step in train),
            train_losses=tuple(train.values()),
            val_steps=tuple(at[step] for step in val),
            val_losses=tuple(val.values()),
            row_losses={at[step]: losses[step] for step in val if step in losses},
        )
        return RecordedJob(
            curve=curve,
            lora_rank=int(self.lora_ranks[rows[0]]),
            adapter_batch_size=int(self.batch_sizes[rows[0]]),
            total_steps=total_in_file,
            file_steps=None if positions is None else {position: step for step, position in positions.items()},
        )

    def _merged(self, name: str, values: np.ndarray, rows: np.ndarray) -> dict[int, float]:
        """Values by rising step, those that are NaN left out. A step may have several rows, but one value."""
        found: dict[int, float] = {}
        for row in rows[~np.isnan(values[rows])]:
            step, value = int(self.steps[row]), float(values[row])
            if found.setdefault(step, value) != value:
                expected = f"{found[step]:g} again, or NaN: {self.job_ids[row]} has that value at step {step}"
                raise self.file.refused(name, int(row), f"{value:g}", expected)
        return found

    def _positions(self, rows: np.ndarray) -> tuple[dict[int, int] | None, int, float]:
        """Where the job's steps lie on the curve (None: as they are), the curve's total steps, and the file's."""
        steps, fractions = self.steps[rows], self.fractions[rows]
        self._check_rising(rows)
        total = steps[-1] / fractions[-1] if fractions[-1] > 0 else 0.0
        whole = max(1, round(float(total)))
        # half a step for rounding a step, one per cent for rounding a fraction
        if steps.max() <= whole and np.all(np.abs(steps - fractions * whole) <= 0.5 + 0.01 * whole):
            return None, whole, float(whole)
        positions: dict[int, int] = {}
        last = -1
        for step, fraction in zip(steps, fractions, strict=True):
            if int(step) not in positions:
                # steps whose fractions were rounded to the same digits stay apart, and in order
                last = positions[int(step)] = max(last + 1, round(float(fraction) * FINE_STEPS))
        return positions, FINE_STEPS, float(max(total, 1.0))

    def _check_rising(self, rows: np.ndarray) -> None:
        """Later steps stand at later fractions; rows of one step at one fraction."""
        for before, row in itertools.pairwise(rows):
            same_step = self.steps[before] == self.steps[row]
            change = self.fractions[row] - self.fractions[before]
            # fractions may be rounded to a few digits, so neighbouring steps may share one
            if change < 0 or (same_step and change > ROUNDING):
                what = f"{self.fractions[before]:g} as at this step before" if same_step else "a fraction not below "
                if not same_step:
                    what += f"{self.fractions[before]:g}, which {self.job_ids[row]} has at step {self.steps[before]}"
                raise self.file.refused("fraction", int(row), f"{self.fractions[row]:g}", what)

    def _check_same(self, name: str, values: np.ndarray, rows: np.ndarray) -> None:
        others = rows[values[rows] != values[rows[0]]]
        if len(others):
            row = int(others[0])
            expected = f"{values[rows[0]]}, as in the first row of {self.job_ids[row]}"
            raise self.file.refused(name, row, f"{values[row]}", expected)

    def _check(self, wrong: np.ndarray, name: str, expected: str) -> None:
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            values = {"learning_rate": self.learning_rates, "fraction": self.fractions}[name]
            raise self.file.refused(name, row, f"{values[row]:g}", expected)
