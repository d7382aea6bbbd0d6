"""Made planning cases that the plan_* benchmarks share, and the table that each of them writes."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence

import numpy as np
from bars import RESULTS

from alto_core.scheduling.instance import Host, Instance, WaitingTask

PACKAGES = ("ortools", "numpy")
MEDIAN_SECONDS, SIGMA = 3600.0, 0.5
DEMANDS, SHARES = (1, 2, 4, 8), (0.5, 0.25, 0.15, 0.1)


def made_hosts(number: int) -> tuple[Host, ...]:
    """So many hosts of eight GPUs."""
    return tuple(Host(host_id=f"host-{i:03d}", gpus=tuple(range(8))) for i in range(number))


def made_instance(seed: int, *, num_tasks: int, num_hosts: int) -> Instance:
    """Durations log-normal around an hour, half of the tasks on one GPU."""
    generator = np.random.default_rng(seed)
    seconds = MEDIAN_SECONDS * np.exp(SIGMA * generator.standard_normal(num_tasks))
    demands = generator.choice(DEMANDS, p=SHARES, size=num_tasks)
    waiting = tuple(
        WaitingTask(task_id=f"t{i:04d}", num_gpus=int(demand), seconds=math.ceil(duration))
        for i, (demand, duration) in enumerate(zip(demands, seconds, strict=True))
    )
    return Instance(hosts=made_hosts(num_hosts), waiting=waiting)


def write_rows(name: str, rows: Sequence[Mapping[str, object]]) -> None:
    """All rows of a benchmark to benchmarks/results/NAME.csv."""
    with (RESULTS.parent / f"{name}.csv").open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
