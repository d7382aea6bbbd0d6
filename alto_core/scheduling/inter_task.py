"""The one room of CP-SAT: the exact model of placing tasks on hosts over time.

Each task is an interval; where it may run on several hosts, it has one optional interval for each and exactly one is
present. A host is a cumulative resource of its free GPUs; running and booked tasks are fixed intervals in it. The
objective is the summed tardiness, then the end of the last task (or, with weights, the weighted starts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from alto_core.scheduling.instance import Booking, Host, Instance, WaitingTask

DECIDED = (cp_model.OPTIMAL, cp_model.FEASIBLE)


@dataclass(frozen=True, kw_only=True)
class SolveLimits:
    """How much CP-SAT may spend."""

    seconds: float
    gap: float
    """Stop when the plan is proven to be within this share of the best one."""
    num_workers: int
    seed: int
    reproducible: bool
    """Limit by deterministic time and use one worker: the same plan on every machine."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """What CP-SAT answered. Its bookings are to be checked like any other's."""

    status: str
    bookings: tuple[Booking, ...]
    """Empty unless the status is OPTIMAL or FEASIBLE."""
    makespan_bound: int
    """Proven when no task is late; 0 when nothing is proven."""


def solve(
    instance: Instance,
    tasks: Sequence[WaitingTask],
    *,
    booked: Sequence[Booking],
    hint: Sequence[Booking],
    bound: int,
    limits: SolveLimits,
) -> Solution:
    """Place tasks around what runs and what is booked.

    Args:
        instance: hosts and running tasks.
        tasks: the tasks to place, each of which fits some host.
        booked: placed before, left as they are.
        hint: a complete plan of these tasks to start from; the horizon is its end, since later is of no use.
        bound: no plan ends earlier.
        limits: time, gap, workers, seed.
    """
    horizon = max(booking.end for booking in hint)
    model = _Model(instance, tasks, booked, horizon=horizon, bound=bound)
    model.add_hint(hint)
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    # Its handler, once taken away, leaves none: Ctrl-C after a solve would end the scheduler without its cleaning up.
    parameters.catch_sigint_signal = False
    parameters.random_seed = limits.seed
    parameters.relative_gap_limit = limits.gap
    parameters.num_workers = 1 if limits.reproducible else limits.num_workers
    if limits.reproducible:
        parameters.max_deterministic_time = limits.seconds
    else:
        parameters.max_time_in_seconds = limits.seconds
    status = solver.solve(model.model)
    solved = status in DECIDED
    return Solution(
        status=solver.status_name(status),
        bookings=model.bookings(solver) if solved else (),
        makespan_bound=model.makespan_bound(solver) if solved else 0,
    )


class _Model:
    def __init__(
        self,
        instance: Instance,
        tasks: Sequence[WaitingTask],
        booked: Sequence[Booking],
        *,
        horizon: int,
        bound: int,
    ):
        self.model = cp_model.CpModel()
        self._tasks, self._horizon = tasks, horizon
        self._starts: dict[str, cp_model.IntVar] = {}
        self._present: dict[str, dict[str, cp_model.IntVar]] = {}
        """By task and host."""
        self._has_deadlines = any(task.deadline is not None for task in tasks)
        loads: dict[str, list[tuple[cp_model.IntervalVar, int]]] = {host.host_id: [] for host in instance.hosts}
        for running in instance.running:
            loads[running.host_id].append((self._fixed(0, running.seconds), len(running.gpus)))
        for booking in booked:
            loads[booking.host_id].append((self._fixed(booking.start, booking.end), booking.num_gpus))
        everywhere = [load for host_loads in loads.values() for load in host_loads]
        makespan = self.model.new_int_var(min(bound, horizon), horizon, "makespan")
        late = []
        for task in tasks:
            start = self.model.new_int_var(task.release, max(task.release, horizon - task.seconds), task.task_id)
            self._starts[task.task_id] = start
            self.model.add(makespan >= start + task.seconds)
            everywhere.append((self.model.new_fixed_size_interval_var(start, task.seconds, ""), task.num_gpus))
            self._add_hosts(task, start, [host for host in instance.hosts if task.fits(host)], loads)
            if task.deadline is not None:
                lateness = self.model.new_int_var(0, horizon, "")
                self.model.add(lateness >= start + task.seconds - max(task.deadline, 0))
                late.append(lateness)
        for host in instance.hosts:
            self._limit(loads[host.host_id], len(host.gpus))
        if len(instance.hosts) > 1:
            self._limit(everywhere, instance.num_gpus)  # implied, and what the solver's bounds come from
        self.model.minimize(sum(late) * (horizon + 1) + makespan)

    def add_hint(self, hint: Sequence[Booking]) -> None:
        for booking in hint:
            self.model.add_hint(self._starts[booking.task_id], booking.start)
            for host_id, present in self._present[booking.task_id].items():
                self.model.add_hint(present, host_id == booking.host_id)

    def bookings(self, solver: cp_model.CpSolver) -> tuple[Booking, ...]:
        result = []
        for task in self._tasks:
            start = solver.value(self._starts[task.task_id])
            host_id = next(host_id for host_id, present in self._present[task.task_id].items() if solver.value(present))
            result.append(
                Booking(
                    task_id=task.task_id,
                    host_id=host_id,
                    num_gpus=task.num_gpus,
                    start=start,
                    end=start + task.seconds,
                )
            )
        return tuple(result)

    def makespan_bound(self, solver: cp_model.CpSolver) -> int:
        """The objective's bound is the makespan's while no deadline takes part in it."""
        return 0 if self._has_deadlines else int(solver.best_objective_bound)

    def _fixed(self, start: int, end: int) -> cp_model.IntervalVar:
        return self.model.new_fixed_size_interval_var(start, end - start, "")

    def _add_hosts(
        self,
        task: WaitingTask,
        start: cp_model.IntVar,
        hosts: Sequence[Host],
        loads: Mapping[str, list[tuple[cp_model.IntervalVar, int]]],
    ) -> None:
        choices = self._present[task.task_id] = {}
        for host in hosts:
            present = choices[host.host_id] = self.model.new_bool_var("")
            interval = self.model.new_optional_fixed_size_interval_var(start, task.seconds, present, "")
            loads[host.host_id].append((interval, task.num_gpus))
        self.model.add_exactly_one(choices.values())

    def _limit(self, loads: Sequence[tuple[cp_model.IntervalVar, int]], num_gpus: int) -> None:
        self.model.add_cumulative([interval for interval, _ in loads], [number for _, number in loads], num_gpus)
