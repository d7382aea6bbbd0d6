"""How many jobs of the 60-job space train side by side on one GPU, by the memory model and in fact.

    python benchmarks/bench_capacity.py --out FOLDER      # on a GPU: writes FOLDER/capacity.csv and capacity.json
    python benchmarks/bench_capacity.py --record FOLDER   # anywhere: takes both into results/

The Llama-3.1-8B shape with random bfloat16 weights, rows of log-normal lengths, ranks 16/32/64 and 1 to 8 rows a step,
five jobs of each. `planned` is what a task is given after the profile stage. `most` is found by trying two joint steps,
with four more jobs as long as they fit, or with four fewer until they do.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gc
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

RANKS, BATCH_SIZES, RATES = (16, 32, 64), (1, 2, 4, 8), 5
COLUMNS = (
    "row",
    "model",
    "jobs",
    "rank_rows",
    "tokens_per_step",
    "predicted_gib",
    "measured_gib",
    "bytes_per_rank_row",
)
STRIDE = 4
"""Jobs between two tries."""


def space(model: str) -> list[Any]:
    """The jobs, mixed: any first part of them holds all ranks and batch sizes."""
    from benchmarks.bench_step import make_jobs

    cells = itertools.product(range(RATES), RANKS, BATCH_SIZES)
    (template,) = make_jobs(1, 1)
    return [
        dataclasses.replace(template, lora_rank=rank if model != "tiny" else 4, adapter_batch_size=batch, seed=seed)
        for seed, (_, rank, batch) in enumerate(cells)
    ]


def measure(model: str, out: Path) -> None:
    from alto_core.profiling import TaskRows, measure_grid, memory_budget, plan_task_packing, shape_of_backbone
    from alto_core.scheduling.memory_model import MemoryModel
    from benchmarks.bench_lora_linear import environment
    from benchmarks.bench_memory import build, random_data, rows_of

    backbone, jobs = build(model), space(model)
    rows = rows_of(backbone, sum(job.adapter_batch_size for job in jobs), 0)
    shape = shape_of_backbone(backbone, jobs[0].target_modules)
    profile = measure_grid(backbone, shape, jobs, rows[:64])
    memory = MemoryModel(shape=shape, fit=profile.memory)
    plan = plan_task_packing(
        memory,
        jobs,
        TaskRows.of(random_data(rows, rows[:16])),
        budget_bytes=memory_budget(backbone.device, shape.backbone_bytes),
        device_type=backbone.device.type,
        max_slots=None,
    )
    capacity = plan.capacity
    table = [("planned", model, capacity.num_slots, capacity.rank_rows, f"{capacity.step_tokens:.0f}",
              f"{plan.peak_bytes / 2**30:.1f}", "", shape.rank_row_bytes)]  # fmt: skip
    most, peak = most_together(backbone, jobs, rows, plan)
    if most:
        tokens = sum(len(row.token_ids) for row in rows[: sum(job.adapter_batch_size for job in jobs[:most])])
        table.append(("most", model, most, sum(job.lora_rank for job in jobs[:most]), tokens, "",
                      f"{peak / 2**30:.1f}", shape.rank_row_bytes))  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    with (out / "capacity.csv").open("w", newline="", encoding="utf-8") as target:
        csv.writer(target, lineterminator="\n").writerows([COLUMNS, *table])
    (out / "capacity.json").write_text(json.dumps({**environment(), "bars": {}}, indent=1), encoding="utf-8")
    for row in table:
        print(*row, flush=True)


def most_together(backbone: Any, jobs: Sequence[Any], rows: Sequence[Any], plan: Any) -> tuple[int, int]:
    """How many of the jobs fit, and their peak bytes; no jobs where none do. Tries begin at what is planned."""
    planned, found = min(len(jobs), plan.capacity.num_slots), (0, 0)

    def peak_of(count: int) -> int | None:
        peak = try_together(backbone, jobs[:count], rows, plan.max_pass_tokens)
        gc.collect()
        print(f"{count} jobs: {'out of memory' if peak is None else f'{peak / 2**30:.1f} GiB'}", flush=True)
        return peak

    for count in range(planned, len(jobs) + 1, STRIDE):
        if (peak := peak_of(count)) is None:
            break
        found = (count, peak)
    for count in () if found[0] else range(planned - STRIDE, 0, -STRIDE):
        if (peak := peak_of(count)) is not None:
            return count, peak
    return found


def try_together(backbone: Any, jobs: Sequence[Any], rows: Sequence[Any], max_pass_tokens: int) -> int | None:
    """Peak bytes of two joint steps of these jobs; None: there was not enough memory."""
    import torch

    from benchmarks.bench_step import engine_with

    step, start = {}, 0
    for job in jobs:
        step[job.job_id] = rows[start : start + job.adapter_batch_size]
        start += job.adapter_batch_size
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    longest = max(len(row.token_ids) for row in rows)
    try:
        with engine_with(backbone, jobs, max_pass_tokens=max_pass_tokens, max_row_tokens=longest) as engine:
            for _ in range(2):
                engine.step(step)
            engine.take_records()
    except torch.cuda.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default="8b", choices=["8b", "1b", "tiny"], help="tiny is for the CPU")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    if options.record:
        from benchmarks.kernel_bars import merge

        merge(options.record, "capacity")
        return
    measure(options.model, options.out)


if __name__ == "__main__":
    main()
