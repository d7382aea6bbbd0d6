"""What batching (B), early exit (EE) and scheduling (S) are worth together: eleven tasks, eight GPUs, simulated.

    python benchmarks/plan_fig12.py

The model. A task is a base model and a data set; 60 jobs on one GPU, 64 on several, three epochs each. A job alone
costs `ms_alone` a row, one among many `ms_batched` (benchmarks/plan_profiles.csv, which says what was measured on an
H200 and what is scaled from it). Early exit trains `1 - saved` of the rows (benchmarks/plan_data_sets.csv). Without S
tasks run first come, first served, and nothing passes a task that waits; with S the planner plans anew at every end,
and knows only how long tasks take when no job ends early; "foreseen" is a planner that knows what early exit will save.
Makespans are means over orders of submission. The last row is the area bound: no schedule of the same tasks is
shorter.
"""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path
from statistics import mean

from bars import record_bar
from plan_cases import PACKAGES, made_hosts, write_rows

from alto_core.scheduling import list_scheduling
from alto_core.scheduling.planner import ESTIMATE_SLACK, PlannerOptions
from alto_core.scheduling.simulator import SimulatedTask, listed, planned, simulate

HERE = Path(__file__).resolve().parent
EPOCHS = 3
ORDERS, PLANNED_ORDERS = 20, 3
"""Of submission; a planner sorts tasks itself and hardly minds."""
NUM_GPUS = 8
ROW_TOKENS = 192
"""Of the rows that the profiles were measured on; cost is taken as proportional to tokens."""
VARIANTS = {
    # name: batched, early exit, scheduled, savings foreseen
    "B": (True, False, False, False),
    "none": (False, False, False, False),
    "S": (False, False, True, False),
    "EE": (False, True, False, False),
    "B+S": (True, False, True, False),
    "B+EE": (True, True, False, False),
    "all": (True, True, True, False),
    "all, foreseen": (True, True, True, True),
}


def paper_tasks(*, batched: bool, early_exit: bool, foreseen: bool = False) -> list[SimulatedTask]:
    """Every model on every data set, less the last one: eleven."""
    models, data_sets = _rows("plan_profiles.csv"), _rows("plan_data_sets.csv")
    tasks = []
    for model in models:
        for data in data_sets:
            num_jobs = 60 if model["num_gpus"] == "1" else 64
            ms = float(model["ms_batched" if batched else "ms_alone"]) * float(data["tokens"]) / ROW_TOKENS
            seconds = num_jobs * EPOCHS * float(data["rows"]) * ms / 1000
            share = 1 - float(data["saved"]) if early_exit else 1.0
            tasks.append(
                SimulatedTask(
                    task_id=f"{model['model']} {data['data_set']}",
                    num_gpus=int(model["num_gpus"]),
                    estimated_seconds=math.ceil(seconds * (share if foreseen else 1.0)),
                    true_seconds=math.ceil(seconds * share),
                )
            )
    return tasks[:-1]


def main() -> None:
    makespans = {}
    for name, (batched, early_exit, scheduled, foreseen) in VARIANTS.items():
        tasks = paper_tasks(batched=batched, early_exit=early_exit, foreseen=foreseen)
        policy = (
            planned(PlannerOptions(seconds=0.3, slack=ESTIMATE_SLACK, reproducible=True))
            if scheduled
            else listed(list_scheduling.fifo, backfill=False)
        )
        num_orders = PLANNED_ORDERS if scheduled else ORDERS
        orders = [random.Random(seed).sample(tasks, len(tasks)) for seed in range(num_orders)]
        makespans[name] = mean(simulate(order, made_hosts(1), policy).makespan for order in orders)
    shortest = paper_tasks(batched=True, early_exit=True)
    makespans["area bound"] = sum(task.num_gpus * task.true_seconds for task in shortest) / NUM_GPUS
    rows = [
        {"variant": name, "hours": round(value / 3600, 2), "speedup_over_b": round(makespans["B"] / value, 3)}
        for name, value in makespans.items()
    ]
    for row in rows:
        print(f"{row['variant']:<14} {row['hours']:8.1f} h   {row['speedup_over_b']:.2f}x of B")
    write_rows("plan_fig12", rows)
    record_bar("plan.fig12_all_over_b", makespans["B"] / makespans["all"], target=">= 5.2", packages=PACKAGES)


def _rows(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(newline="", encoding="utf-8") as source:
        return list(csv.DictReader(source))


if __name__ == "__main__":
    main()
