"""The optional file of row losses: one line per job, evaluation step and validation row, for paired standard errors."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from alto_core.curve_files.columns import ColumnFile
from alto_core.domain import RowLosses

ROW_COLUMNS = ("job_id", "step", "row", "loss_sum", "num_tokens")


def read_row_losses(path: Path) -> tuple[Mapping[str, Mapping[int, RowLosses]], list[str]]:
    """Row losses by job and step, and notes on what was left out.

    Two evaluations can be compared where they cover the same rows with as many tokens each. Those that cover other rows
    than most, or hold a loss that is no number, are left out: their jobs are compared without a standard error there.

    Raises:
        DataError: the file cannot be read, lacks a column, or holds a value that cannot be meant.
    """
    file = ColumnFile(path, ROW_COLUMNS)
    if len(file) == 0:
        return {}, []
    job_ids = file.text("job_id")
    steps, rows = file.whole_numbers("step", at_least=0), file.whole_numbers("row", at_least=0)
    sums, tokens = file.numbers("loss_sum", missing_as_nan=True), file.whole_numbers("num_tokens", at_least=0)
    names, codes = np.unique(np.array(job_ids, dtype=object), return_inverse=True)
    order = np.lexsort((rows, steps, codes))
    codes, steps, rows, sums, tokens = codes[order], steps[order], rows[order], sums[order], tokens[order]
    same = (np.diff(codes) == 0) & (np.diff(steps) == 0)
    repeated = np.flatnonzero(same & (np.diff(rows) == 0))
    if len(repeated):
        at = int(order[repeated[0] + 1])
        expected = f"each row of {job_ids[at]} at step {steps[repeated[0]]} once"
        raise file.refused("row", at, f"{rows[repeated[0]]} again", expected)
    bounds = [0, *(np.flatnonzero(~same) + 1).tolist(), len(rows)]
    groups = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    covered = [(rows[group].tobytes(), tokens[group].tobytes()) for group in groups]
    most, _ = Counter(covered).most_common(1)[0]
    found: dict[str, dict[int, RowLosses]] = {}
    left_out = 0
    for group, covers in zip(groups, covered, strict=True):
        if covers != most or not np.isfinite(sums[group]).all():
            left_out += 1
            continue
        losses = RowLosses(loss_sums=tuple(sums[group].tolist()), num_labels=tuple(tokens[group].tolist()))
        found.setdefault(str(names[codes[group.start]]), {})[int(steps[group.start])] = losses
    notes = []
    if left_out:
        notes.append(
            f"{path.name}: {left_out} of {len(groups)} evaluations cover other rows than most, or hold a loss that is "
            "no number; they are compared without a standard error"
        )
    return found, notes
