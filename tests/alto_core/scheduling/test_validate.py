"""The checker: a right plan passes, and each single way to be wrong is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alto_core.scheduling.instance import Instance, Placement, Plan, RunningTask
from alto_core.scheduling.validate import plan_faults

from .conftest import hosts, task

INSTANCE = Instance(
    hosts=hosts(2, 1),
    waiting=(task("wide", 2, 10), task("late", 1, 5, release=3, deadline=6)),
    running=(RunningTask(task_id="busy", host_id="host-0", gpus=(1,), seconds=4),),
)
WIDE = Placement(task_id="wide", host_id="host-0", gpus=(0, 1), start=4, end=14)
LATE = Placement(task_id="late", host_id="host-1", gpus=(0,), start=3, end=8)
PLAN = Plan(placements=(WIDE, LATE), makespan=14, bound=14, tardiness=2, method="", solver_status="", solve_seconds=0.0)


def test_a_plan_that_can_be_carried_out_has_no_fault() -> None:
    assert plan_faults(INSTANCE, PLAN) == ()
    assert (
        plan_faults(Instance(hosts=(), waiting=()), replace(PLAN, placements=(), makespan=0, bound=0, tardiness=0))
        == ()
    )


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        (replace(PLAN, placements=(WIDE,), tardiness=0), "late: not in the plan"),
        (replace(PLAN, placements=(WIDE, LATE, LATE)), "placed 2 times"),
        (
            replace(PLAN, placements=(WIDE, LATE, replace(LATE, task_id="who", start=20, end=25))),
            "who: no waiting task",
        ),
        (replace(PLAN, placements=(replace(WIDE, end=13), LATE)), "got 9 s, expected 10 s"),
        (replace(PLAN, placements=(WIDE, replace(LATE, start=2, end=7))), "not before 3"),
        (replace(PLAN, placements=(replace(WIDE, gpus=(0,)), LATE)), "expected 2 different ones"),
        (replace(PLAN, placements=(replace(WIDE, gpus=(0, 0)), LATE)), "expected 2 different ones"),
        (replace(PLAN, placements=(WIDE, replace(LATE, gpus=(7,)))), "expected some of"),
        (replace(PLAN, placements=(WIDE, replace(LATE, host_id="nowhere"))), "which is no host"),
        (
            replace(PLAN, placements=(replace(WIDE, start=3, end=13), LATE)),
            "GPU 1 of host-0: busy until 4 and wide from 3",
        ),
        (replace(PLAN, placements=(WIDE, replace(LATE, host_id="host-0", start=9, end=14))), "GPU 0 of host-0"),
        (replace(PLAN, makespan=13), "makespan"),
        (replace(PLAN, bound=15), "bound"),
        (replace(PLAN, tardiness=0), "tardiness"),
    ],
)
def test_each_fault_is_found(plan: Plan, fault: str) -> None:
    assert any(fault in found for found in plan_faults(INSTANCE, plan)), plan_faults(INSTANCE, plan)


def test_gpus_without_the_memory_are_a_fault() -> None:
    instance = replace(INSTANCE, waiting=(task("wide", 2, 10, min_gpu_bytes=1), INSTANCE.waiting[1]))
    assert any("needs 1 bytes" in fault for fault in plan_faults(instance, PLAN))
