"""Plans: always valid, never worse than the lists, optimal where that can be checked, aims in the promised order."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from alto_core.queue_states import Priority
from alto_core.scheduling import inter_task, list_scheduling
from alto_core.scheduling.bounds import makespan_bound
from alto_core.scheduling.effort import PlannerOptions
from alto_core.scheduling.instance import Booking, Host, Instance, Plan
from alto_core.scheduling.list_scheduling import list_schedule
from alto_core.scheduling.planner import plan_instance
from alto_core.scheduling.validate import plan_faults

from .conftest import best_makespan, hosts, random_instance, task

QUICK = PlannerOptions(seconds=0.3)
REPOSITORY = Path(__file__).resolve().parents[3]


def starts(plan: Plan) -> dict[str, int]:
    return {placement.task_id: placement.start for placement in plan.placements}


def test_plans_of_small_instances_are_optimal() -> None:
    for seed in range(40):
        instance = random_instance(seed, num_tasks=1 + seed % 6, sizes=(4,), num_running=seed % 3)
        plan = plan_instance(instance, PlannerOptions(seconds=2, gap=0))
        assert plan_faults(instance, plan) == ()
        assert plan.makespan == best_makespan(instance)
        assert plan.bound <= plan.makespan


@pytest.mark.parametrize("sizes", [(8,), (4, 4), (8, 8, 2)])
def test_no_plan_is_worse_than_a_list(sizes: tuple[int, ...]) -> None:
    for seed in range(8):
        instance = random_instance(seed, num_tasks=20, sizes=sizes, num_running=2)
        plan = plan_instance(instance, QUICK)
        assert plan_faults(instance, plan) == ()
        for order in (list_scheduling.fifo, list_scheduling.shortest_first, list_scheduling.longest_first):
            assert plan.makespan <= max(b.end for b in list_schedule(instance, order(instance.waiting)))


def test_ctrl_c_still_interrupts_after_a_plan_was_solved() -> None:
    """In a process of its own: a solver that takes the signal for itself would end this one."""
    script = """
import os, signal
from alto_core.scheduling.effort import PlannerOptions
from alto_core.scheduling.planner import plan_instance
from tests.alto_core.scheduling.conftest import random_instance

signal.signal(signal.SIGINT, signal.default_int_handler)
plan = plan_instance(random_instance(0, num_tasks=20, sizes=(8,)), PlannerOptions(seconds=1, gap=0))
assert plan.solver_status, "a plan of the lists alone proves nothing"
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


def test_a_solver_without_time_leaves_the_list_plan() -> None:
    """Four hundred tasks and five milliseconds: UNKNOWN, with a complete hint at hand."""
    instance = random_instance(0, num_tasks=400, sizes=(8,))
    hint = list_schedule(instance, list_scheduling.longest_first(instance.waiting))
    limits = inter_task.SolveLimits(seconds=0.005, gap=0, num_workers=2, seed=0, reproducible=False)
    solution = inter_task.solve(
        instance, instance.waiting, booked=(), hint=hint, bound=makespan_bound(instance), limits=limits
    )
    assert (solution.status, solution.bookings) == ("UNKNOWN", ())
    plan = plan_instance(instance, PlannerOptions(seconds=0.005, gap=0))
    assert plan_faults(instance, plan) == ()
    assert plan.makespan <= max(booking.end for booking in hint)
    assert (plan.solver_status, plan.method in ("longest", "widest", "largest", "shortest", "fifo")) == (
        "UNKNOWN",
        True,
    )


@pytest.mark.parametrize(
    "solution",
    [
        inter_task.Solution(status="INFEASIBLE", bookings=(), makespan_bound=0),
        inter_task.Solution(
            status="OPTIMAL",
            bookings=tuple(Booking(task_id=f"t{i}", host_id="host-0", num_gpus=1, start=0, end=1) for i in range(12)),
            makespan_bound=1,
        ),
        inter_task.Solution(
            status="OPTIMAL",
            bookings=(Booking(task_id="t0", host_id="host-0", num_gpus=1, start=0, end=1),),
            makespan_bound=1,
        ),
    ],
    ids=["infeasible", "too many at a time and too short", "tasks left out"],
)
def test_a_wrong_answer_of_the_solver_is_not_used(
    solution: inter_task.Solution, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    instance = random_instance(1, num_tasks=12, sizes=(4,))
    monkeypatch.setattr(inter_task, "solve", lambda *_, **__: solution)
    with caplog.at_level(logging.WARNING):
        plan = plan_instance(instance, replace(QUICK, gap=0))
    assert plan_faults(instance, plan) == ()
    assert plan.method != "cp-sat"
    assert "not used" in caplog.text


def test_the_same_seed_gives_the_same_plan_when_work_is_counted() -> None:
    options = PlannerOptions(seconds=0.5, gap=0, seed=3, reproducible=True)
    for sizes in ((8,), (4, 4)):
        instance = random_instance(2, num_tasks=14, sizes=sizes)
        plans = [plan_instance(instance, replace(options, num_workers=workers)) for workers in (1, 8, 2)]
        assert len({plan.placements for plan in plans}) == 1


def test_classes_come_in_their_order_and_lower_ones_fill_the_gaps() -> None:
    waiting = (
        task("low", 4, 10, priority=Priority.BACKGROUND),
        task("gap", 1, 10, priority=Priority.BACKGROUND),
        task("normal", 4, 10),
        task("urgent", 3, 10, priority=Priority.URGENT),
    )
    plan = plan_instance(Instance(hosts=hosts(4), waiting=waiting), QUICK)
    assert starts(plan) == {"urgent": 0, "gap": 0, "normal": 10, "low": 20}


def test_deadlines_come_before_the_makespan() -> None:
    waiting = (task("a", 1, 30), task("b", 1, 30), task("due", 2, 10, deadline=10))
    plan = plan_instance(Instance(hosts=hosts(2), waiting=waiting), QUICK)
    assert starts(plan) == {"due": 0, "a": 10, "b": 10}
    assert plan.tardiness == 0
    past = replace(waiting[2], deadline=-5)
    late = plan_instance(Instance(hosts=hosts(2), waiting=(*waiting[:2], past)), QUICK)
    assert (late.tardiness, starts(late)["due"]) == (10, 0)


def test_an_owner_who_has_had_less_starts_first() -> None:
    waiting = (*(task(f"a{i}", 1, 10, owner="ann") for i in range(4)), task("b", 1, 10, owner="bob"))
    plan = plan_instance(Instance(hosts=hosts(1), waiting=waiting, usage={"ann": 100.0}), QUICK)
    assert starts(plan)["b"] == 0


def test_many_tasks_on_many_hosts_come_nearer_to_the_bound_than_any_list() -> None:
    instance = random_instance(0, num_tasks=100, sizes=(8,) * 8)
    lists = plan_instance(instance, PlannerOptions(seconds=0))
    plan = plan_instance(instance, PlannerOptions(seconds=3))
    assert plan_faults(instance, plan) == ()
    assert plan.method == "lanes"
    assert plan.gap < lists.gap / 2


def test_equal_tasks_that_do_not_come_out_even_are_known_to_be_planned_well() -> None:
    """Fifteen on two GPUs: eight follow each other on one of them. No search is needed to know it."""
    instance = Instance(hosts=hosts(2), waiting=tuple(task(f"t{i}", 1, 5) for i in range(15)))
    plan = plan_instance(instance, PlannerOptions(seconds=0))
    assert (plan.makespan, plan.bound) == (40, 40)


def test_the_longest_first_list_is_kept_within_the_slack() -> None:
    """Upper estimates do not bear out a gain of a few hundredths; a larger one is taken."""
    instance = random_instance(6, num_tasks=12, sizes=(8,))
    longest = max(b.end for b in list_schedule(instance, list_scheduling.longest_first(instance.waiting)))
    best = plan_instance(instance, PlannerOptions(seconds=2, reproducible=True))
    needed = longest / best.makespan - 1
    assert needed > 0.001, "an instance on which the list is not the best plan"
    for slack, makespan in ((1.01 * needed, longest), (0.99 * needed, best.makespan)):
        plan = plan_instance(instance, PlannerOptions(seconds=2, reproducible=True, slack=slack))
        assert plan.makespan == makespan


def test_tasks_go_where_the_memory_is() -> None:
    machines = (
        Host(host_id="small", gpus=(0, 1), gpu_bytes=80),
        Host(host_id="big", gpus=(4, 6), gpu_bytes=141),
    )
    waiting = (task("a", 2, 10, min_gpu_bytes=100), task("b", 2, 10, min_gpu_bytes=80))
    plan = plan_instance(Instance(hosts=machines, waiting=waiting), QUICK)
    placed = {placement.task_id: (placement.host_id, placement.gpus) for placement in plan.placements}
    assert placed == {"a": ("big", (4, 6)), "b": ("small", (0, 1))}
