"""What bench_dpo.py trains on what, and how both it and sequential_dpo.py count steps and time."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BETA = 0.1
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PRESETS = {"none": "without_exit", "guarded": "with_exit"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained on what."""

    model: Path
    pairs: Path
    device: str
    jobs: tuple[Any, ...]
    train_pairs: int
    validation_pairs: int
    test_pairs: int
    seconds: float
    """Of one timing."""
    evaluations: int
    """Of a job."""
    presets: tuple[str, ...]
    """Whole runs to make, of `PRESETS`."""


def steps_of(job: Any, data: Any) -> int:
    """Of one epoch."""
    return -(-len(data.train.rows) // job.rows_per_update)


def seconds_of(call: Callable[[int], Any], setting: Setting) -> float:
    """Of one call, the median of three rounds; the calls are given their number."""
    import torch

    def wait() -> None:
        if setting.device == "cuda":
            torch.cuda.synchronize()

    def run(count: int) -> float:
        wait()
        started = time.perf_counter()
        for i in range(count):
            call(i)
        wait()
        return (time.perf_counter() - started) / count

    run(2)
    count = max(2, round(setting.seconds / 3 / run(2)))
    return statistics.median(run(count) for _ in range(3))
