"""Made instances: equal hosts, tasks with log-normal durations, and a brute-force optimum for tiny ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from alto_core.scheduling.instance import Host, Instance, RunningTask, WaitingTask

MakeInstance = Callable[..., Instance]


def hosts(*sizes: int) -> tuple[Host, ...]:
    return tuple(Host(host_id=f"host-{i}", gpus=tuple(range(size))) for i, size in enumerate(sizes))


def task(task_id: str, num_gpus: int, seconds: int, **fields: object) -> WaitingTask:
    return WaitingTask(task_id=task_id, num_gpus=num_gpus, seconds=seconds, **fields)  # type: ignore[arg-type]


def random_instance(seed: int, *, num_tasks: int, sizes: tuple[int, ...], num_running: int = 0) -> Instance:
    """Durations log-normal around an hour, demands mostly small, some GPUs taken already."""
    draw = random.Random(seed)
    widest = max(sizes)
    demands = [demand for demand in (1, 2, 4, 8) if demand <= widest]
    weights = [0.5, 0.25, 0.15, 0.1][: len(demands)]
    waiting = tuple(
        task(f"t{i}", draw.choices(demands, weights)[0], max(1, round(3600 * draw.lognormvariate(0, 0.5))))
        for i in range(num_tasks)
    )
    machines = hosts(*sizes)
    running = tuple(
        RunningTask(
            task_id=f"r{i}",
            host_id=machines[i % len(machines)].host_id,
            gpus=(i // len(machines),),
            seconds=draw.randint(1, 7200),
        )
        for i in range(num_running)
    )
    return Instance(hosts=machines, waiting=waiting, running=running)


def best_makespan(instance: Instance) -> int:
    """The optimum on one host by trying every order of serial scheduling, which contains an optimal plan."""
    (host,) = instance.hosts
    best = sum(t.seconds for t in instance.waiting) + sum(t.seconds for t in instance.running)
    for order in itertools.permutations(instance.waiting):
        taken = [(0, r.seconds, len(r.gpus)) for r in instance.running]
        for t in order:
            moments = sorted({0, *(end for _, end, _ in taken)})
            start = next(m for m in moments if _fits(taken, m, m + t.seconds, t.num_gpus, len(host.gpus)))
            taken.append((start, start + t.seconds, t.num_gpus))
        best = min(best, max(end for _, end, _ in taken))
    return best


def _fits(taken: list[tuple[int, int, int]], start: int, end: int, num_gpus: int, most: int) -> bool:
    moments = [start, *(s for s, _, _ in taken if start < s < end)]
    return all(sum(g for s, e, g in taken if s <= m < e) + num_gpus <= most for m in moments)


@pytest.fixture
def two_hosts() -> tuple[Host, ...]:
    return hosts(4, 4)
