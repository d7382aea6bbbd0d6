"""Branch and bound against every order tried by hand, and what it says when it was cut short."""

from __future__ import annotations

import pytest

from alto_core.scheduling.bounds import makespan_bound
from alto_core.scheduling.branching import branch
from alto_core.scheduling.effort import Effort
from alto_core.scheduling.instance import Instance
from alto_core.scheduling.validate import booking_faults

from .conftest import best_makespan, hosts, random_instance, task

PLENTY = Effort(seconds=600, reproducible=True)


@pytest.mark.parametrize("seed", range(12))
def test_it_ends_with_the_optimum_of_all_orders(seed: int) -> None:
    instance = random_instance(seed, num_tasks=6, sizes=(4 if seed % 2 else 8,), num_running=seed % 3)
    best = best_makespan(instance)
    serial = sum(t.seconds for t in (*instance.waiting, *instance.running))
    found = branch(instance, instance.waiting, end=serial + 1, bound=makespan_bound(instance), effort=PLENTY)
    assert found.is_complete
    assert booking_faults(instance, found.bookings, ()) == ()
    assert max([b.end for b in found.bookings] + [r.seconds for r in instance.running]) == best

    none_better = branch(instance, instance.waiting, end=best, bound=0, effort=PLENTY)
    assert none_better.is_complete and not none_better.bookings


def test_cut_short_it_claims_nothing() -> None:
    instance = Instance(hosts=hosts(8), waiting=tuple(task(f"t{i}", 1 + i % 5, 100 + 7 * i) for i in range(14)))
    found = branch(instance, instance.waiting, end=10_000, bound=1, effort=Effort(seconds=0.001, reproducible=True))
    assert not found.is_complete
