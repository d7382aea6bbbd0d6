"""The simulator: what it does to tasks is what a cluster would do, and the planner holds its own in it."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise

import pytest

from alto_core.scheduling import list_scheduling
from alto_core.scheduling.effort import PlannerOptions
from alto_core.scheduling.simulator import Policy, SimulatedTask, Simulation, listed, planned, simulate

from .conftest import hosts

POLICIES: dict[str, Policy] = {
    "fifo": listed(list_scheduling.fifo, backfill=False),
    "longest": listed(list_scheduling.longest_first, backfill=True),
    "planner": planned(PlannerOptions(seconds=0.05)),
}


def made_tasks(seed: int, number: int) -> list[SimulatedTask]:
    draw = random.Random(seed)
    tasks = []
    for i in range(number):
        estimate = max(1, round(600 * draw.lognormvariate(0, 0.5)))
        tasks.append(
            SimulatedTask(
                task_id=f"t{i}",
                num_gpus=draw.choice([1, 1, 2, 4]),
                estimated_seconds=estimate,
                true_seconds=max(1, round(estimate * draw.uniform(0.25, 1.2))),
                arrival=draw.choice([0, 0, 300, 900]),
            )
        )
    return tasks


def check(tasks: list[SimulatedTask], result: Simulation) -> None:
    """Every task ran once, whole, after its arrival, and no GPU had two at a time."""
    by_id = {task.task_id: task for task in tasks}
    assert sorted(run.task_id for run in result.runs) == sorted(by_id)
    spans = defaultdict(list)
    for run in result.runs:
        task = by_id[run.task_id]
        assert run.end - run.start == task.true_seconds
        assert run.start >= task.arrival
        assert len(set(run.gpus)) == task.num_gpus
        for gpu in run.gpus:
            spans[run.host_id, gpu].append((run.start, run.end))
    for taken in spans.values():
        taken.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(taken))


@pytest.mark.parametrize("name", POLICIES)
def test_every_task_runs_once_and_no_gpu_is_shared(name: str) -> None:
    for seed in range(3):
        tasks = made_tasks(seed, 15)
        check(tasks, simulate(tasks, hosts(4, 4), POLICIES[name]))


def test_waiting_for_a_replan_costs_what_it_costs() -> None:
    tasks = [SimulatedTask(task_id=f"t{i}", num_gpus=1, estimated_seconds=100, true_seconds=100) for i in range(4)]
    prompt = simulate(tasks, hosts(1), POLICIES["planner"])
    slow = simulate(tasks, hosts(1), POLICIES["planner"], latency_seconds=5)
    assert (prompt.makespan, prompt.latency_share) == (400, 0.0)
    assert slow.makespan == 420
    assert slow.latency_share == pytest.approx(20 / 400)


def test_the_planner_beats_the_plain_queues() -> None:
    total = dict.fromkeys(POLICIES, 0)
    for seed in range(3):
        tasks = made_tasks(seed, 20)
        for name, policy in POLICIES.items():
            total[name] += simulate(tasks, hosts(4), policy).makespan
    assert total["planner"] < total["fifo"]
    assert total["planner"] <= total["longest"] * 1.03
