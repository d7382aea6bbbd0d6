"""The reference's log-probabilities of a task's preference pairs: measured once per pair, kept on disk.

The reference is what every job of a task starts from: the frozen backbone alone, or with the adapter that the task
names (`init_adapter`). It is the same for all jobs, epochs and resumes, and for other tasks with the same rows, so the
file is named after all that the numbers depend on. No second model is held, and no job runs a second pass.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from alto_core.budget import rows_of_step
from alto_core.data.rows import PairRow, TaskData
from alto_core.domain import JobBudget, LoraJob
from alto_core.engine.adapter_parallel import AnyEngine
from alto_core.engine.backbone import Backbone
from alto_core.engine.engine import UNTUNED
from alto_core.engine.export import WEIGHTS
from alto_core.engine.quantized_linear import quantized_layers
from alto_core.whole_files import whole_file

ROWS_PER_ROUND = 256
"""Measured before anyone is asked whether to go on."""
SECONDS_BETWEEN_WRITES = 20.0
SCHEMA = pa.schema([("row_id", pa.int64()), ("chosen", pa.float64()), ("rejected", pa.float64())])


class References:
    """Sums of token losses of chosen and rejected answers by row id, as far as they have been measured.

    Args:
        file: where they are kept.
    """

    def __init__(self, file: Path):
        self._file = file
        self.by_row: dict[int, tuple[float, float]] = _read(file)
        """For `PreferenceObjective`; filled by `measure`."""

    def measure(
        self,
        engine: AnyEngine,
        pairs: Sequence[PairRow],
        *,
        max_tokens: int,
        start: tuple[LoraJob, Path] | None = None,
        between_rounds: Callable[[], None] = lambda: None,
    ) -> int:
        """Measure the pairs that are not known yet, and write them down.

        Args:
            engine: with a free slot where the reference has an adapter.
            pairs: that will be trained or evaluated.
            max_tokens: of one forward pass.
            start: a job that is admitted with the start adapter of this folder; None: the backbone alone.
            between_rounds: called every few hundred pairs, after they are safe; may raise to stop.

        Returns:
            How many were measured.
        """
        missing = [pair for pair in pairs if pair.row_id not in self.by_row]
        if not missing:
            return 0
        job_id = UNTUNED
        if start is not None:
            job, folder = start
            job_id = job.job_id
            engine.admit(job, JobBudget(total_steps=1, warmup_steps=1, eval_steps=(1,)), init_adapter=folder)
        try:
            self._measure(engine, job_id, missing, max_tokens, between_rounds)
        finally:
            _write(self._file, self.by_row)
            if start is not None:
                engine.evict(job_id)
        return len(missing)

    def _measure(
        self,
        engine: AnyEngine,
        job_id: str,
        missing: Sequence[PairRow],
        max_tokens: int,
        between_rounds: Callable[[], None],
    ) -> None:
        written = time.monotonic()
        for first in range(0, len(missing), ROWS_PER_ROUND):
            part = missing[first : first + ROWS_PER_ROUND]
            sums = engine.side_losses(job_id, part, max_tokens=max_tokens).tolist()
            self.by_row.update(
                {pair.row_id: (chosen, rejected) for pair, (chosen, rejected) in zip(part, sums, strict=True)}
            )
            if time.monotonic() - written > SECONDS_BETWEEN_WRITES:
                _write(self._file, self.by_row)
                written = time.monotonic()
            between_rounds()


def pairs_needed(
    data: TaskData, jobs: Iterable[LoraJob], budgets: Mapping[str, JobBudget], *, seed: int
) -> list[PairRow]:
    """The held-out pairs, and those that any job may train on within its budget."""
    rows = data.train.rows
    most = max(job.rows_per_update * budgets[job.job_id].total_steps for job in jobs)
    # All jobs go through the same order of rows, so the one that gets furthest passes those of the others.
    trained = rows_of_step(step=1, num_train_rows=len(rows), rows_per_update=min(most, len(rows)), seed=seed)
    held_out = [row for split in data.splits if split is not data.train for row in split.rows]
    return [row for row in (*held_out, *(rows[i] for i in trained)) if isinstance(row, PairRow)]


def reference_key(data_digest: str, backbone: Sequence[Any], init_adapter: Path | None) -> str:
    """Equal where the same log-probabilities would come out again.

    It counts the rows, and with them tokenizer and template, the weights, dtype, kind of device and start adapter.

    Args:
        data_digest: of the rows.
        backbone: its `fingerprint`.
        init_adapter: folder of the start adapter.
    """
    adapter = None if init_adapter is None else hashlib.sha256((init_adapter / WEIGHTS).read_bytes()).hexdigest()
    parts = [data_digest, *backbone, adapter]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def fingerprint(backbone: Backbone) -> tuple[Any, ...]:
    """Weights, dtype and kind of device. Where ranks hold parts of the weights, all of them call it together.

    A weight counts by the sum of its bits as integers: exact on every device, and another where it is another.
    """
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    sums = []
    packed = (tensor for layer in quantized_layers(backbone.model) for tensor in layer.stored)
    for parameter in (*backbone.model.parameters(), *packed):
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        bits = own.detach().contiguous().view(whole[own.element_size()]).sum(dtype=torch.int64)
        if isinstance(parameter, DTensor):
            dist.all_reduce(bits)
        sums.append((list(parameter.shape), int(bits)))
    return (sums, str(backbone.dtype), backbone.device.type)


def _read(file: Path) -> dict[int, tuple[float, float]]:
    """What is there; a file that cannot be read counts as none, since all of it can be measured again."""
    try:
        table = pq.read_table(file)
    except (OSError, pa.ArrowException):
        return {}
    if not table.schema.equals(SCHEMA):
        return {}
    columns = (table[name].to_pylist() for name in SCHEMA.names)
    return {row_id: (chosen, rejected) for row_id, chosen, rejected in zip(*columns, strict=True)}


def _write(file: Path, by_row: dict[int, tuple[float, float]]) -> None:
    chosen, rejected = zip(*by_row.values(), strict=True) if by_row else ((), ())
    with whole_file(file) as partial:
        pq.write_table(pa.table([list(by_row), list(chosen), list(rejected)], schema=SCHEMA), partial)
