"""How many jobs fit side by side, and how long a step takes: two measured steps and arithmetic.

Memory of n jobs is modelled as what the backbone holds, plus per job its adapter with gradient and two moments, plus a
measured number of bytes for each token of the joint step.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil
import torch

from alto_core.budget import rows_of_step
from alto_core.data.rows import TaskData
from alto_core.device import free_bytes
from alto_core.domain import JobBudget, LoraJob, TaskProfile
from alto_core.engine.backbone import Backbone
from alto_core.engine.engine import Engine
from alto_core.engine.target_modules import select_layers
from alto_core.errors import EngineError

SAFETY_SHARE = 0.85
"""Share of the free memory that jobs may plan with."""


@dataclass(frozen=True, kw_only=True)
class _Measured:
    seconds: float
    peak_bytes: int
    """Above what was held before the step."""
    num_tokens: int


def profile_task(
    backbone: Backbone, jobs: Sequence[LoraJob], data: TaskData, *, data_seed: int, max_slots: int | None
) -> TaskProfile:
    """Measure a step of the largest job and decide how many jobs train side by side.

    Args:
        backbone: the loaded base model.
        jobs: all jobs of the task.
        data: the task's rows.
        data_seed: seeds the order of rows.
        max_slots: upper bound from the task file, or None.

    Raises:
        EngineError: not even one job fits; the text shows the arithmetic.
    """
    largest = max(jobs, key=lambda job: (job.adapter_batch_size, job.lora_rank))
    bytes_per_job = adapter_bytes(backbone, max(jobs, key=lambda job: job.lora_rank))
    free = free_bytes(backbone.device)
    _require(bytes_per_job <= free, bytes_per_job, free, "the largest adapter with gradient and moments alone")
    _measure_step(backbone, largest, data, data_seed)
    measured = _measure_step(backbone, largest, data, data_seed)
    longest = max(len(row.token_ids) for row in data.train.rows)
    tokens_per_job = largest.adapter_batch_size * longest
    bytes_per_token = measured.peak_bytes / measured.num_tokens
    needed = bytes_per_job + tokens_per_job * bytes_per_token
    budget = free * SAFETY_SHARE
    _require(needed <= budget, needed, budget, f"one job with {tokens_per_job} tokens a step")
    num_slots = min(len(jobs), max_slots or len(jobs), int(budget // needed))
    return TaskProfile(
        device=str(backbone.device),
        num_slots=num_slots,
        seconds_per_step=measured.seconds * num_slots,
        tokens_per_second=measured.num_tokens / measured.seconds,
        peak_bytes=int(num_slots * needed),
        bytes_per_job=bytes_per_job,
    )


def adapter_bytes(backbone: Backbone, job: LoraJob) -> int:
    """Bytes of one job's adapter, gradient and two moments, all in fp32."""
    width = sum(layer.d_in + layer.d_out for layer in select_layers(backbone.layers, job.target_modules))
    return 4 * 4 * job.lora_rank * width


def _require(fits: bool, needed: float, available: float, what: str) -> None:
    if not fits:
        raise EngineError(
            f"not enough memory: {what} needs {needed / 2**30:.2f} GiB, {available / 2**30:.2f} GiB are free for it. "
            "Use a smaller lora_rank, adapter_batch_size or data.max_length, or free memory."
        )


def _measure_step(backbone: Backbone, job: LoraJob, data: TaskData, data_seed: int) -> _Measured:
    rows = data.train.rows
    indices = rows_of_step(step=1, num_train_rows=len(rows), rows_per_update=job.adapter_batch_size, seed=data_seed)
    batch = tuple(rows[i] for i in indices)
    engine = Engine(backbone, target_modules=job.target_modules, num_slots=1, rank_rows=job.lora_rank)
    try:
        engine.admit(job, JobBudget(total_steps=1, warmup_steps=1, eval_steps=(1,)))
        with _peak_memory(backbone.device) as peak:
            started = time.perf_counter()
            engine.step({job.job_id: batch})
            engine.take_records()
            seconds = time.perf_counter() - started
    finally:
        engine.close()
    return _Measured(seconds=seconds, peak_bytes=peak[0], num_tokens=sum(len(row.token_ids) for row in batch))


@contextlib.contextmanager
def _peak_memory(device: torch.device) -> Iterator[list[int]]:
    """Yields a list whose one entry, after the block, is the highest memory above the start."""
    peak = [0]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak[0] = torch.cuda.max_memory_allocated(device) - before
        return
    process, done = psutil.Process(), threading.Event()
    before = process.memory_info().rss

    def sample() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], process.memory_info().rss - before)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield peak
    finally:
        done.set()
        sampler.join()
        peak[0] = max(peak[0], process.memory_info().rss - before, 1)
