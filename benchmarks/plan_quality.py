"""How good plans are, and how fast: against the lower bound, and against lists and queues.

    python benchmarks/plan_quality.py paper11     # the paper's mix of tasks, proven optimal: the best of five
    python benchmarks/plan_quality.py gap_100     # 100 tasks on 8 hosts of 8 GPUs, 5 s each
    python benchmarks/plan_quality.py gap_1000    # 1,000 tasks on 64 hosts, 30 s each: ten minutes
    python benchmarks/plan_quality.py losses      # 200 instances against FIFO, shortest first and backfilled LPT

Gaps are makespan over bound, less one, the worst of twenty seeds among the instances that area bounds. Searches are
limited by counted work, so that the figures do not depend on what else the machine does; the CPU seconds that the work
took stand in the tables. The search for the paper's mix is one thread: an idle core takes as long as its CPU seconds.
"""

from __future__ import annotations

import sys
import time

from bars import record_bar
from plan_cases import PACKAGES, made_hosts, made_instance, write_rows
from plan_fig12 import paper_tasks

from alto_core.scheduling import list_scheduling
from alto_core.scheduling.bounds import area_bound, makespan_bound
from alto_core.scheduling.instance import Instance, WaitingTask
from alto_core.scheduling.list_scheduling import list_schedule
from alto_core.scheduling.planner import PlannerOptions, plan_instance

SEEDS = 20
LISTS = {
    "fifo": (list_scheduling.fifo, False),
    "shortest": (list_scheduling.shortest_first, False),
    "lpt": (list_scheduling.longest_first, True),
}


def paper11() -> None:
    """Eleven tasks of four models on eight GPUs."""
    waiting = tuple(
        WaitingTask(task_id=task.task_id, num_gpus=task.num_gpus, seconds=task.estimated_seconds)
        for task in paper_tasks(batched=True, early_exit=False)
    )
    instance = Instance(hosts=made_hosts(1), waiting=waiting)
    taken = []
    for _ in range(5):
        before = time.process_time()
        plan = plan_instance(instance, PlannerOptions(seconds=60, gap=0))
        taken.append(time.process_time() - before)
        assert plan.gap == 0, f"not proven optimal: {plan.makespan} above {plan.bound}"
    seconds = ", ".join(f"{one:.2f}" for one in taken)
    print(f"optimal to the second, {plan.makespan / 3600:.1f} h, by {plan.method} in {seconds} CPU seconds")
    record_bar("plan.paper11_seconds", min(taken), target="<= 1", unit="CPU s", packages=PACKAGES)


def gap(num_tasks: int, num_hosts: int, seconds: float, bar: str, target: str) -> None:
    rows = []
    for seed in range(SEEDS):
        instance = made_instance(seed, num_tasks=num_tasks, num_hosts=num_hosts)
        bound = makespan_bound(instance)
        by_area = area_bound(instance) == bound
        lpt = list_schedule(instance, list_scheduling.longest_first(instance.waiting))
        before = time.process_time()
        plan = plan_instance(instance, PlannerOptions(seconds=seconds, gap=0.001, reproducible=True))
        cpu_seconds = time.process_time() - before
        rows.append(
            {
                "seed": seed,
                "bound_by": "area" if by_area else "other",
                "bound": bound,
                "makespan": plan.makespan,
                "gap": round(plan.makespan / bound - 1, 5),
                "lpt_gap": round(max(booking.end for booking in lpt) / bound - 1, 5),
                "method": plan.method,
                "cpu_seconds": round(cpu_seconds, 2),
            }
        )
        print(*rows[-1].values(), flush=True)
    write_rows(f"plan_{bar}", rows)
    worst = max(float(row["gap"]) for row in rows if row["bound_by"] == "area")
    slowest = max(float(row["cpu_seconds"]) for row in rows)
    print(f"worst gap {worst:.4f}, at most {slowest:.1f} CPU seconds")
    record_bar(f"plan.{bar}", worst, target=target, packages=PACKAGES)


def losses() -> None:
    """Instances of all sizes, a second each."""
    rows = []
    for seed in range(200):
        num_hosts = (1, 1, 2, 4, 8)[seed % 5]
        instance = made_instance(10_000 + seed, num_tasks=5 + (seed * 7) % 60, num_hosts=num_hosts)
        ends = {
            name: max(b.end for b in list_schedule(instance, order(instance.waiting), backfill=backfill))
            for name, (order, backfill) in LISTS.items()
        }
        plan = plan_instance(instance, PlannerOptions(seconds=1, reproducible=True))
        rows.append({"seed": seed, "tasks": len(instance.waiting), "hosts": num_hosts, "plan": plan.makespan, **ends})
    write_rows("plan_losses", rows)
    lost = sum(any(int(row["plan"]) > int(row[name]) for name in LISTS) for row in rows)
    for name in LISTS:
        gains = [int(row[name]) / int(row["plan"]) - 1 for row in rows]
        print(f"{name}: {sum(gains) / len(gains):.1%} longer than the plan in the mean, {max(gains):.0%} at most")
    print(f"{lost} of {len(rows)} lost")
    record_bar("plan.losses_to_heuristics", lost, target="= 0", unit="of 200", packages=PACKAGES)


if __name__ == "__main__":
    started = time.monotonic()
    {
        "paper11": paper11,
        "gap_100": lambda: gap(100, 8, 5, "gap_100x64", "<= 0.02"),
        "gap_1000": lambda: gap(1000, 64, 30, "gap_1000x512", "<= 0.015"),
        "losses": losses,
    }[sys.argv[1]]()
    print(f"{time.monotonic() - started:.0f} s")
