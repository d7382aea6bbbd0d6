"""What a task pays beside its passes, as the profile stage finds it: captures, compilation, places of jobs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from alto_core.domain import JobBudget, LoraJob
from alto_core.engine.capture_choice import PassKind
from alto_core.engine.checkpoint import write_snapshot
from alto_core.engine.engine import Engine
from alto_core.engine.passes import CaptureTime
from alto_core.scheduling.prediction import SideCosts

COMPILING_CAPTURES = 2
"""Layers are compiled for one size first, and for any size at the second."""

Result = TypeVar("Result")


def measure_place(engine: Engine, job: LoraJob, budget: JobBudget, folder: Path) -> SideCosts:
    """What it costs to give a job its slot, to let it go and to bring it back, for each of its rank rows.

    Args:
        engine: in which the job has trained; afterwards it holds a slot again, as it was.
        job: whose costs they are.
        budget: of the job.
        folder: gets the job's state and adapter.
    """

    def timed(call: Callable[[], Result]) -> tuple[float, Result]:
        started = time.perf_counter()
        result = call()
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
        return (time.perf_counter() - started) / job.rank_rows, result

    engine.take_records()
    copying, snapshot = timed(lambda: engine.snapshot(job.job_id))
    exporting, _ = timed(lambda: engine.export(job.job_id, folder / "adapter"))
    writing, _ = timed(lambda: write_snapshot(snapshot, folder / "state"))
    engine.evict(job.job_id)
    admitting, _ = timed(lambda: engine.admit(job, budget))
    engine.evict(job.job_id)
    restoring, _ = timed(lambda: engine.restore(job, budget, folder / "state"))
    return SideCosts(
        admit_seconds=admitting,
        restore_seconds=restoring,
        leave_seconds=copying + exporting,
        write_seconds=writing,
        state_bytes=snapshot.num_bytes / job.rank_rows,
    )


def capture_costs(times: Sequence[CaptureTime]) -> SideCosts:
    """The price of a capture, and the seconds that the first ones took longer.

    Args:
        times: of one engine's captures, the first of the process among them, in their order.
    """
    training = [one for one in times if one.kind is not PassKind.LOSSES]
    evaluation = [one for one in times if one.kind is PassKind.LOSSES]
    if not training:
        return SideCosts()
    settled = training[COMPILING_CAPTURES:] or training[-1:]
    price = statistics.fmean(one.seconds - one.compile_seconds for one in settled)
    last = evaluation[-1] if evaluation else None
    evaluation_price = price if last is None else last.seconds - last.compile_seconds
    longer = sum(
        one.compile_seconds
        if one in settled or one is last
        else max(0.0, one.seconds - (evaluation_price if one.kind is PassKind.LOSSES else price))
        for one in times
    )
    return SideCosts(
        captures=True, capture_seconds=price, evaluation_capture_seconds=evaluation_price, compile_seconds=longer
    )
