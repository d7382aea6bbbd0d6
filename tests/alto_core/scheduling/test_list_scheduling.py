"""List schedules: valid on anything, and the orders do what they say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from alto_core.scheduling import list_scheduling
from alto_core.scheduling.bounds import makespan_bound
from alto_core.scheduling.gpu_choice import choose_gpus
from alto_core.scheduling.instance import Booking, Instance, Plan, tardiness_of
from alto_core.scheduling.list_scheduling import list_schedule
from alto_core.scheduling.timeline import HostTimeline
from alto_core.scheduling.validate import plan_faults

from .conftest import best_makespan, hosts, random_instance, task

ORDERS = [
    list_scheduling.fifo,
    list_scheduling.shortest_first,
    list_scheduling.longest_first,
    list_scheduling.widest_first,
    list_scheduling.largest_first,
    list_scheduling.earliest_deadline_first,
]


def as_plan(instance: Instance, bookings: tuple[Booking, ...]) -> Plan:
    ends = [booking.end for booking in bookings] + [running.seconds for running in instance.running]
    return Plan(
        placements=choose_gpus(instance, bookings),
        makespan=max(ends),
        bound=makespan_bound(instance),
        tardiness=tardiness_of(instance.task_by_id, bookings),
        method="",
        solver_status="",
        solve_seconds=0.0,
    )


@pytest.mark.parametrize("backfill", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_makes_a_valid_plan(order: Callable, backfill: bool) -> None:  # type: ignore[type-arg]
    for seed, sizes in enumerate([(8,), (4, 2), (8, 8, 3), (1,), (8, 8, 8, 8)]):
        instance = random_instance(seed, num_tasks=25, sizes=sizes, num_running=len(sizes))
        bookings = list_schedule(instance, order(instance.waiting), backfill=backfill)
        assert plan_faults(instance, as_plan(instance, bookings)) == ()


def test_without_backfilling_nothing_passes_a_task_that_does_not_fit() -> None:
    instance = Instance(hosts=hosts(2), waiting=(task("a", 1, 10), task("b", 2, 10), task("c", 1, 5)))
    strict = {b.task_id: b.start for b in list_schedule(instance, instance.waiting, backfill=False)}
    filled = {b.task_id: b.start for b in list_schedule(instance, instance.waiting)}
    assert strict == {"a": 0, "b": 10, "c": 20}
    assert filled == {"a": 0, "b": 10, "c": 0}


def test_tasks_are_not_started_into_what_is_booked() -> None:
    instance = Instance(hosts=hosts(2), waiting=(task("long", 1, 9), task("short", 1, 3)))
    booked = (Booking(task_id="x", host_id="host-0", num_gpus=2, start=5, end=10),)
    starts = {b.task_id: b.start for b in list_schedule(instance, instance.waiting, booked=booked)}
    assert starts == {"long": 10, "short": 0}


def test_small_tasks_leave_whole_hosts_free() -> None:
    instance = Instance(hosts=hosts(4, 2), waiting=(task("small", 2, 5), task("wide", 4, 5)))
    assert {b.start for b in list_schedule(instance, instance.waiting)} == {0}


def test_owners_take_turns_by_what_they_have_had() -> None:
    tasks = [task(f"a{i}", 1, 10, owner="ann") for i in range(3)] + [task("b0", 1, 5, owner="bob")]
    assert [t.task_id for t in list_scheduling.fair_order(tasks, {})] == ["a0", "b0", "a1", "a2"]
    assert [t.task_id for t in list_scheduling.fair_order(tasks, {"bob": 25.0})] == ["a0", "a1", "a2", "b0"]


def test_the_bound_is_never_above_the_optimum() -> None:
    for seed in range(60):
        instance = random_instance(seed, num_tasks=1 + seed % 5, sizes=(4,), num_running=seed % 3)
        assert makespan_bound(instance) <= best_makespan(instance)


def test_the_bound_counts_tasks_that_only_some_hosts_can_run() -> None:
    waiting = tuple(task(f"t{i}", 4, 10) for i in range(3))
    assert makespan_bound(Instance(hosts=hosts(4, 2, 2), waiting=waiting)) == 30
    wide = tuple(task(f"t{i}", 3, 10 + i) for i in range(3))
    assert makespan_bound(Instance(hosts=hosts(4, 4), waiting=wide)) == 21


def test_a_timeline_finds_the_first_gap() -> None:
    line = HostTimeline(4)
    line.book(3, 0, 10)
    line.book(2, 15, 20)
    assert line.earliest(1, 100, 0) == 0
    assert line.earliest(2, 5, 0) == 10
    assert line.earliest(3, 6, 0) == 20
    assert line.earliest(3, 5, 12) == 20
    assert line.is_free(2, 10, 30)
    assert not line.is_free(3, 10, 16)
