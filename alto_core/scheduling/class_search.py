"""The best plan of one priority class: list schedules first, then searches while the gap is worth closing.

Whatever a search returns is checked like a stranger's, and the best list schedule stands until something better is
proven right; so there is always a valid plan, never worse than the lists. Fair share between owners decides among plans
that end at about the same time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from alto_core.scheduling import list_scheduling
from alto_core.scheduling.bounds import makespan_bound
from alto_core.scheduling.branching import MAX_TASKS, branch
from alto_core.scheduling.effort import Effort, PlannerOptions
from alto_core.scheduling.instance import Booking, Host, Instance, WaitingTask, tardiness_of
from alto_core.scheduling.lanes import LaneProblem, balance_lanes
from alto_core.scheduling.list_scheduling import list_schedule
from alto_core.scheduling.validate import booking_faults

FAIR_SLACK = 0.05
"""By this share a plan may end later when it treats owners fairly."""
MAX_EXACT_CHOICES = 1500
"""Tasks times hosts up to which the exact model is of use within seconds."""
FEW_CHOICES = 400
"""Tasks times hosts up to which annealing, where it applies, leaves half of the time to the exact model; above, all."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Places for the tasks of a class, and what they are worth."""

    bookings: tuple[Booking, ...]
    method: str
    tardiness: int
    end: int

    @property
    def score(self) -> tuple[int, int]:
        return self.tardiness, self.end

    def is_as_good(self, *, tardiness: int, end: int, slack: float) -> bool:
        """As a plan of this tardiness and end, which it may exceed by this share."""
        return self.tardiness <= tardiness and self.end <= end * (1 + slack)


class ClassSearch:
    """The tasks of one priority class, around what is booked already."""

    def __init__(
        self, instance: Instance, tasks: Sequence[WaitingTask], booked: Sequence[Booking], options: PlannerOptions
    ):
        self._instance = replace(instance, waiting=tuple(tasks))
        self._tasks, self._booked, self._options = tasks, tuple(booked), options
        self.bound = makespan_bound(self._instance)
        self.solver_status = ""

    def run(self) -> Candidate:
        """The best plan of this class."""
        lists = self._lists()
        best, steady = min(lists, key=lambda candidate: candidate.score), lists[0]
        if steady.is_as_good(tardiness=0, end=self.bound, slack=self._options.slack):
            return self._fair(steady)  # whatever a search found, this would be taken
        seconds = self._options.seconds
        choices = len(self._tasks) * len(self._instance.hosts)
        if self._worth_more(best) and self._lanes_apply():
            share = 0.5 if choices <= FEW_CHOICES else 1.0
            best = self._better(best, self._by_lanes(seconds * share))
            seconds *= 1 - share
        if self._worth_more(best) and self._branching_applies():
            seconds /= 2
            best = self._better(best, self._by_branching(best, seconds))
        if self._worth_more(best) and choices <= MAX_EXACT_CHOICES and seconds > 0:
            best = self._better(best, self._by_solver(best, seconds))
        if steady.is_as_good(tardiness=best.tardiness, end=best.end, slack=self._options.slack):
            best = steady
        return self._fair(best)

    def _worth_more(self, best: Candidate) -> bool:
        return self._options.seconds > 0 and (best.tardiness > 0 or best.end > self.bound * (1 + self._options.gap))

    def _lists(self) -> list[Candidate]:
        orders = {
            "longest": list_scheduling.longest_first(self._tasks),
            "widest": list_scheduling.widest_first(self._tasks),
            "largest": list_scheduling.largest_first(self._tasks),
            "shortest": list_scheduling.shortest_first(self._tasks),
            "fifo": list_scheduling.fifo(self._tasks),
        }
        if any(task.deadline is not None for task in self._tasks):
            orders["deadline"] = list_scheduling.earliest_deadline_first(self._tasks)
        return [
            self._candidate(list_schedule(self._instance, order, booked=self._booked), name)
            for name, order in orders.items()
        ]

    def _candidate(self, bookings: Sequence[Booking], method: str) -> Candidate:
        ends = [booking.end for booking in (*bookings, *self._booked)]
        return Candidate(
            bookings=tuple(bookings),
            method=method,
            tardiness=tardiness_of(self._instance.task_by_id, bookings),
            end=max([*ends, *(task.seconds for task in self._instance.running)], default=0),
        )

    def _better(self, best: Candidate, other: Candidate | None) -> Candidate:
        return other if other is not None and other.score < best.score else best

    def _lanes_apply(self) -> bool:
        """Many equal hosts, each good for every task, nothing that ties a task to a time."""
        hosts = self._instance.hosts
        return (
            len(hosts) > 1
            and self._only_durations_matter()
            and len({len(host.gpus) for host in hosts}) == 1
            and all(task.fits(host) for task in self._tasks for host in hosts)
        )

    def _branching_applies(self) -> bool:
        """So few tasks on one host that all plans can be gone through."""
        return len(self._instance.hosts) == 1 and len(self._tasks) <= MAX_TASKS and self._only_durations_matter()

    def _only_durations_matter(self) -> bool:
        return not self._booked and not any(task.release or task.deadline is not None for task in self._tasks)

    def _by_lanes(self, seconds: float) -> Candidate:
        hosts = self._instance.hosts
        problem = LaneProblem(
            tasks=self._tasks,
            num_hosts=len(hosts),
            gpus_per_host=len(hosts[0].gpus),
            taken=[seconds for host in hosts for seconds in self._taken(host)],
        )
        slots = balance_lanes(
            problem,
            bound=self.bound,
            seconds=seconds,
            reproducible=self._options.reproducible,
            seed=self._options.seed,
        )
        bookings = [
            Booking(
                task_id=task.task_id,
                host_id=hosts[slot.host].host_id,
                num_gpus=task.num_gpus,
                start=slot.start,
                end=slot.start + task.seconds,
            )
            for task, slot in zip(self._tasks, slots, strict=True)
        ]
        return self._candidate(bookings, "lanes")

    def _by_branching(self, best: Candidate, seconds: float) -> Candidate | None:
        options = self._options
        effort = Effort(seconds=seconds, reproducible=options.reproducible)
        found = branch(self._instance, self._tasks, end=best.end, bound=self.bound, effort=effort)
        candidate = self._candidate(found.bookings, "branching") if found.bookings else None
        if found.is_complete:
            self.bound = (candidate or best).end
        return candidate

    def _taken(self, host: Host) -> list[int]:
        """How long each GPU of a host is taken, the wide running tasks side by side first."""
        running = [task for task in self._instance.running if task.host_id == host.host_id]
        taken = [
            task.seconds for task in sorted(running, key=lambda task: -len(task.gpus)) for _ in range(len(task.gpus))
        ]
        return taken + [0] * (len(host.gpus) - len(taken))

    def _by_solver(self, best: Candidate, seconds: float) -> Candidate | None:
        from alto_core.scheduling import inter_task  # here: it takes a second, and most plans do without

        options = self._options
        solution = inter_task.solve(
            self._instance,
            self._tasks,
            booked=self._booked,
            hint=best.bookings,
            bound=self.bound,
            limits=inter_task.SolveLimits(
                seconds=seconds,
                gap=options.gap,
                num_workers=options.num_workers,
                seed=options.seed,
                reproducible=options.reproducible,
            ),
        )
        self.solver_status = solution.status
        if not solution.bookings:
            if solution.status == "UNKNOWN":
                logger.info("CP-SAT found nothing in %.1f s; the plan is by %s", seconds, best.method)
            else:
                logger.warning("CP-SAT says %s of tasks that have a plan; its answer is not used", solution.status)
            return None
        found = self._candidate(solution.bookings, "cp-sat")
        faults = booking_faults(self._instance, found.bookings, self._booked)
        if faults:
            logger.warning("CP-SAT's plan is not used: %s", "; ".join(faults[:3]))
            return None
        self.bound = max(self.bound, min(solution.makespan_bound, found.end))
        return found

    def _fair(self, best: Candidate) -> Candidate:
        """A plan that serves owners in turn, where there are several and it ends little later."""
        if len({task.owner for task in self._tasks}) < 2:
            return best
        order = list_scheduling.fair_order(self._tasks, self._instance.usage)
        fair = self._candidate(list_schedule(self._instance, order, booked=self._booked), "fair")
        return fair if fair.is_as_good(tardiness=best.tardiness, end=best.end, slack=FAIR_SLACK) else best
