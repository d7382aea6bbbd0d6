"""Times joint steps over a grid of packings, the highest memory that each takes, and what comes beside steps."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import torch

from alto_core.data.rows import TokenRow
from alto_core.device import is_out_of_memory
from alto_core.domain import JobBudget, LoraJob
from alto_core.engine.backbone import Backbone
from alto_core.engine.capture_choice import bucket
from alto_core.engine.engine import Engine
from alto_core.engine.regional_compile import compile_time
from alto_core.profiling.grid import grid_of, num_tokens
from alto_core.profiling.side_costs import capture_costs, measure_place
from alto_core.scheduling.memory_model import ModelShape, PassSize, fit_memory
from alto_core.scheduling.model_profile import GridPoint, ModelProfile
from alto_core.scheduling.prediction import PassSpeed, SideCosts, fit_speed

PROFILE_SECONDS = {"cpu": 9.0, "cuda": 35.0}
"""No further packing is begun after so long."""
MAX_JOBS = {"cpu": 4, "cuda": 8}
"""Side by side in a measured packing."""
MAX_PACKING_TOKENS = {"cpu": 512, "cuda": 2**30}
"""Of a measured packing with more than one job."""
STEADY_STEPS = 5
"""That a GPU makes in a row to be timed."""
MIN_POINTS = {"cpu": 2, "cuda": 3}
"""However long they take: the first two captures of a GPU compile, the third shows what a capture takes."""
EVALUATED_TOKENS = {"cpu": 256, "cuda": 4096}
"""Of the pass that tells how long an evaluation takes."""
BUDGET = JobBudget(total_steps=10**6, warmup_steps=1, eval_steps=(10**6,))


def measure_grid(
    backbone: Backbone,
    shape: ModelShape,
    jobs: Sequence[LoraJob],
    rows: Sequence[TokenRow],
    *,
    cuda_graph: bool = True,
    max_tokens: int = 2**30,
    folder: Path | None = None,
) -> ModelProfile:
    """Measure packings of the task's own jobs and rows, the most telling ones first, until the time is spent.

    Memory that runs out ends the grid; what was measured by then counts.

    Args:
        backbone: where ranks hold parts of it, all of them call this at the same time.
        shape: of the model.
        jobs, rows: of the task.
        cuda_graph: as in `Engine`.
        max_tokens: packings with more are left out, unless nothing else is left: where ranks hold parts of the
            backbone, memory that runs out ends all of them.
        folder: on the disk that states of jobs will be written to; None: where temporary files go.
    """
    started = time.perf_counter()
    kind = backbone.device.type
    packings = grid_of(jobs, rows, MAX_JOBS[kind], MAX_PACKING_TOKENS[kind])
    packings = [one for one in packings if num_tokens(one) <= max_tokens] or [min(packings, key=num_tokens)]
    together = max((packing for packing, _ in packings), key=len)
    points: list[GridPoint] = []
    costs = SideCosts()
    opened = time.perf_counter()
    ranks = max(sum(job.lora_rank for job in packing) for packing, _ in packings)
    with compile_time() as compiling:
        engine = Engine(
            backbone,
            target_modules=sorted({name for job in jobs for name in job.target_modules}),
            num_slots=len(together),
            rank_rows=ranks,
            max_lora_rank=max(job.lora_rank for job in jobs),
            max_pass_tokens=2**30,
            max_row_tokens=max(len(row.token_ids) for row in rows),
            recomputed=shape.recomputed,
            cuda_graph=cuda_graph,
        )
    engine_seconds = time.perf_counter() - opened - compiling[0]
    resident = psutil.Process().memory_info().rss

    def note_place() -> None:
        nonlocal costs
        if not points:
            for _ in range(2):  # the second time nothing is new any more
                with tempfile.TemporaryDirectory(dir=folder) as place:
                    costs = measure_place(engine, packing[0], BUDGET, Path(place))

    try:
        for packing, chosen in packings:
            if len(points) >= MIN_POINTS[kind] and time.perf_counter() - started > PROFILE_SECONDS[kind]:
                break
            try:
                points.append(measure_packing(engine, packing, chosen, resident_before=resident, then=note_place))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                break
        speed = fit_speed([(point.size.tokens, point.seconds) for point in points])
        speed = dataclasses.replace(speed, eval_share=_eval_share(engine, speed, together[0], rows, points))
        times = engine.take_capture_times()
    finally:
        closing = time.perf_counter()
        engine.close()
        engine_seconds += time.perf_counter() - closing
    captures = capture_costs(times)
    memory = fit_memory(shape, [(point.size, point.peak_bytes) for point in _telling(points, kind)])
    residual = max(abs(speed.step_seconds(p.size.tokens, 2**30) - p.seconds) / p.seconds for p in points)
    return ModelProfile(
        points=tuple(points),
        memory=memory,
        speed=speed,
        speed_residual=residual,
        profile_seconds=time.perf_counter() - started,
        costs=dataclasses.replace(
            costs,
            captures=captures.captures,
            capture_seconds=captures.capture_seconds,
            evaluation_capture_seconds=captures.evaluation_capture_seconds,
            compile_seconds=captures.compile_seconds + compiling[0],
            engine_seconds=engine_seconds,
        ),
    )


def measure_packing(
    engine: Engine,
    jobs: Sequence[LoraJob],
    rows: Sequence[Sequence[TokenRow]],
    *,
    resident_before: int,
    then: Callable[[], None],
) -> GridPoint:
    """One packing in one pass: memory of the first step, and its time once it is steady.

    Args:
        engine: has room for the jobs, and holds none.
        jobs: distinct.
        rows: of each job, a micro batch.
        resident_before: memory of this process before any packing; on a CPU the peak counts from there.
        then: called while the jobs hold their slots.
    """
    device = engine.device
    engine.forget_captures()  # a larger pass captured before would be filled up, and measured in place of this one
    for job in jobs:
        engine.admit(job, BUDGET)
    step: Mapping[str, Sequence[TokenRow]] = dict(zip((job.job_id for job in jobs), rows, strict=True))
    try:
        with peak_memory(device, resident_before) as peak:
            seconds = _timed(engine, step)
        # The first step on a CPU takes new memory, which costs.
        seconds = _steady_seconds(engine, step) if device.type == "cuda" else min(seconds, _timed(engine, step))
        then()
    finally:
        for job in jobs:
            engine.evict(job.job_id)
    lengths = [len(row.token_ids) for part in rows for row in part]
    tokens = sum(lengths)
    return GridPoint(
        num_jobs=len(jobs),
        adapter_batch_size=max(job.adapter_batch_size for job in jobs),
        row_tokens=tokens / len(lengths),
        size=PassSize(
            tokens=bucket(tokens) if device.type == "cuda" else tokens,
            labels=sum(row.num_labels for part in rows for row in part),
            lora_rank=max(job.lora_rank for job in jobs),
        ),
        num_tokens=tokens,
        seconds=seconds,
        peak_bytes=peak[0],
    )


@contextlib.contextmanager
def peak_memory(device: torch.device, resident_before: int | None = None) -> Iterator[list[int]]:
    """Yields a list whose one entry, after the block, is the highest memory above the start.

    Args:
        device: whose memory.
        resident_before: memory of this process from which a CPU's peak counts; None: what it is now.
    """
    peak = [0]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak[0] = torch.cuda.max_memory_allocated(device) - before
        return
    process, done = psutil.Process(), threading.Event()
    before = process.memory_info().rss if resident_before is None else resident_before

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


def _timed(engine: Engine, step: Mapping[str, Sequence[TokenRow]]) -> float:
    started = time.perf_counter()
    engine.step(step)
    engine.take_records()
    return time.perf_counter() - started


def _steady_seconds(engine: Engine, step: Mapping[str, Sequence[TokenRow]]) -> float:
    """Of each further step in a row, as training makes them: the host prepares it while the device computes."""
    first = _timed(engine, step)
    started = time.perf_counter()
    for _ in range(1 + STEADY_STEPS):
        engine.step(step)
    engine.take_records()
    seconds = time.perf_counter() - started
    return max(seconds - first, seconds / 2) / STEADY_STEPS


def _telling(points: Sequence[GridPoint], kind: str) -> list[GridPoint]:
    """Points whose memory says something: a process keeps what it freed, which hides smaller packings after larger."""
    if kind == "cuda":
        return list(points)
    found: list[GridPoint] = []
    for point in points:
        if not found or point.size.tokens > found[-1].size.tokens:
            found.append(point)
    return found


def _eval_share(
    engine: Engine, speed: PassSpeed, job: LoraJob, rows: Sequence[TokenRow], points: Sequence[GridPoint]
) -> float:
    """Time of an evaluated token over that of a trained one, in a pass no larger than a measured one."""
    on_gpu = engine.device.type == "cuda"
    most = min(EVALUATED_TOKENS[engine.device.type], max(point.num_tokens for point in points))
    labelled = [row for row in rows if row.num_labels]
    engine.admit(job, BUDGET)
    try:
        # A GPU compiles for one size first, and for any size at the second.
        for size in (most // 4, most) if on_gpu else (most,):
            chosen: list[TokenRow] = []
            tokens = 0
            for row in itertools.cycle(labelled):
                if chosen and tokens + len(row.token_ids) > size:
                    break
                chosen.append(row)
                tokens += len(row.token_ids)
            seconds = [_evaluation_seconds(engine, job, chosen, tokens) for _ in range(3 if on_gpu else 2)]
    finally:
        engine.evict(job.job_id)
    trained = speed.seconds_per_token * (bucket(tokens) if on_gpu else tokens)
    return min(1.0, min(seconds) / trained) if trained else 1.0


def _evaluation_seconds(engine: Engine, job: LoraJob, rows: Sequence[TokenRow], tokens: int) -> float:
    started = time.perf_counter()
    engine.evaluate([job.job_id], rows, max_tokens=tokens)
    return time.perf_counter() - started
