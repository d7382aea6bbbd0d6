"""Assignments to lanes: always ones that can be carried out, and hosts left to the tasks that fill them."""

from __future__ import annotations

import itertools
import random

from alto_core.scheduling.lanes import LaneProblem, LaneSlot, balance_lanes

from .conftest import task


def slots_of(problem: LaneProblem, *, bound: int, seconds: float) -> tuple[LaneSlot, ...]:
    return balance_lanes(problem, bound=bound, seconds=seconds, reproducible=True, seed=0)


def test_no_lane_has_two_tasks_at_once_or_one_before_it_is_free() -> None:
    draw = random.Random(3)
    tasks = [task(f"t{i}", draw.choice((1, 2, 3, 4, 8)), draw.randint(1, 50)) for i in range(60)]
    taken = [draw.randint(0, 30) for _ in range(24)]
    problem = LaneProblem(tasks=tasks, num_hosts=3, gpus_per_host=8, taken=taken)
    slots = slots_of(problem, bound=1, seconds=0.2)
    for host in range(3):
        spans = [
            (s.start, s.start + t.seconds, t.num_gpus) for s, t in zip(slots, tasks, strict=True) if s.host == host
        ]
        running = [(0, end, 1) for end in taken[8 * host : 8 * host + 8]]
        for moment in {start for start, _, _ in spans}:
            assert sum(gpus for start, end, gpus in (*spans, *running) if start <= moment < end) <= 8


def test_a_task_that_fills_its_host_stays_alone_there() -> None:
    """Whatever is put beside the first task ends two hundredths above the bound; without that nothing has to."""
    draw = random.Random(0)
    lanes = [sorted(draw.sample(range(35, 965), 4)) for _ in range(56)]
    cuts = [[b - a for a, b in itertools.pairwise([0, *ends, 1000])] for ends in lanes]
    pieces = [piece for parts in cuts for piece in parts if piece >= 35]
    tasks = [task("wide", 8, 985), *(task(f"t{i}", 1, piece) for i, piece in enumerate(pieces))]
    problem = LaneProblem(tasks=tasks, num_hosts=8, gpus_per_host=8, taken=[0] * 64)
    slots = slots_of(problem, bound=1000, seconds=3.0)
    assert [slot.host for slot in slots].count(slots[0].host) == 1
    assert max(slot.start + t.seconds for slot, t in zip(slots, tasks, strict=True)) < 1020
