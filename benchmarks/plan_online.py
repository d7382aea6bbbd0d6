"""Tasks that really end at 25 to 100 % of their estimates: what replanning at every end gains over queues.

    python benchmarks/plan_online.py [NUMBER OF TASKS]

One host of eight GPUs, twenty seeds, twenty and sixty tasks. Figures are makespans over a bound that knows the true
durations; queues and planner see estimates only.
"""

from __future__ import annotations

import math
import sys

import numpy as np
from bars import record_bar
from plan_cases import PACKAGES, made_hosts, made_instance, write_rows

from alto_core.scheduling import list_scheduling
from alto_core.scheduling.bounds import makespan_bound
from alto_core.scheduling.effort import PlannerOptions
from alto_core.scheduling.instance import Instance, WaitingTask
from alto_core.scheduling.planner import ESTIMATE_SLACK
from alto_core.scheduling.simulator import SimulatedTask, listed, planned, simulate

SEEDS = 20
TARGETS = {20: "<= 1.12", 60: "<= 1.02"}
"""Of the mean over the seeds, by number of tasks."""
POLICIES = {
    "fifo": listed(list_scheduling.fifo, backfill=False),
    "sjf": listed(list_scheduling.shortest_first, backfill=True),
    "largest": listed(list_scheduling.largest_first, backfill=False),
    "lpt": listed(list_scheduling.longest_first, backfill=True),
    "planner": planned(PlannerOptions(seconds=0.3, slack=ESTIMATE_SLACK, reproducible=True)),
}


def main() -> None:
    wanted = [int(number) for number in sys.argv[1:]] or list(TARGETS)
    for num_tasks in wanted:
        rows = []
        for seed in range(SEEDS):
            tasks = made_tasks(seed, num_tasks)
            bound = clairvoyant_bound(tasks)
            ratios = {
                name: round(simulate(tasks, made_hosts(1), policy).makespan / bound, 4)
                for name, policy in POLICIES.items()
            }
            rows.append({"seed": seed, "bound": bound, **ratios})
        means = {name: float(np.mean([row[name] for row in rows])) for name in POLICIES}
        print(num_tasks, "tasks:", ", ".join(f"{name} {mean:.3f}" for name, mean in means.items()), flush=True)
        write_rows(f"plan_online_{num_tasks}", rows)
        record_bar(
            f"plan.online_over_bound_{num_tasks}", means["planner"], target=TARGETS[num_tasks], packages=PACKAGES
        )


def made_tasks(seed: int, number: int) -> list[SimulatedTask]:
    waiting = made_instance(seed, num_tasks=number, num_hosts=1).waiting
    shares = np.random.default_rng(1_000 + seed).uniform(0.25, 1.0, number)
    return [
        SimulatedTask(
            task_id=task.task_id,
            num_gpus=task.num_gpus,
            estimated_seconds=task.seconds,
            true_seconds=math.ceil(task.seconds * share),
        )
        for task, share in zip(waiting, shares, strict=True)
    ]


def clairvoyant_bound(tasks: list[SimulatedTask]) -> int:
    waiting = tuple(
        WaitingTask(task_id=task.task_id, num_gpus=task.num_gpus, seconds=task.true_seconds) for task in tasks
    )
    return makespan_bound(Instance(hosts=made_hosts(1), waiting=waiting))


if __name__ == "__main__":
    main()
