"""Finds and proves the best plan of a few tasks on one host: branch and bound over the moments at which tasks start.

Time is gone through from one end of a task to the next; at each such moment some set of tasks is started. Two rules
keep the tree small. A plan that ends by a limit can leave only so many GPU-seconds idle, and these are counted on the
way. And a task that had room since the moment before is not started: the plan that starts it then ends no later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from alto_core.scheduling.effort import Effort
from alto_core.scheduling.instance import Booking, Instance, WaitingTask

MAX_TASKS = 14
"""With more tasks the tree is as a rule too large for seconds."""
STEPS_PER_NODE = 20
"""What a node counts for, in steps of `Effort`."""

Load = tuple[int, int]
"""When a task that runs ends, and how many GPUs it has."""


@dataclass(frozen=True, kw_only=True)
class Branching:
    """What the search came to."""

    bookings: tuple[Booking, ...]
    """The best plan that ends before the one that was known; empty when none was found."""
    is_complete: bool
    """Whether nothing was left unsearched: then no plan is better than this one, or than the known one."""


def branch(instance: Instance, tasks: Sequence[WaitingTask], *, end: int, bound: int, effort: Effort) -> Branching:
    """Look for plans that end before a known one, each better than the last, until there is none.

    Args:
        instance: one host, and what runs on it.
        tasks: the tasks to place, all of them there now, none with a deadline.
        end: when the known plan ends.
        bound: no plan ends earlier.
        effort: how long to search.
    """
    (host,) = instance.hosts
    bookings: tuple[Booking, ...] = ()
    nodes = _Nodes(effort)
    while end > bound:
        search = _Search(instance, tasks, limit=end - 1, nodes=nodes)
        try:
            starts = search.run()
        except _OutOfEffortError:
            return Branching(bookings=bookings, is_complete=False)
        if starts is None:
            break
        bookings = tuple(
            Booking(
                task_id=task.task_id,
                host_id=host.host_id,
                num_gpus=task.num_gpus,
                start=starts[task.task_id],
                end=starts[task.task_id] + task.seconds,
            )
            for task in tasks
        )
        end = max([booking.end for booking in bookings] + [task.seconds for task in instance.running])
    return Branching(bookings=bookings, is_complete=True)


class _OutOfEffortError(Exception):
    pass


@dataclass
class _Nodes:
    """Counts nodes, over several searches, against one effort."""

    effort: Effort
    number: int = 0

    def count(self) -> None:
        self.number += 1
        if self.effort.spent(self.number * STEPS_PER_NODE) >= 1:
            raise _OutOfEffortError


class _Search:
    """One search for a plan that ends by a limit. Tasks are numbers here, wide and long ones first."""

    def __init__(self, instance: Instance, tasks: Sequence[WaitingTask], *, limit: int, nodes: _Nodes):
        ordered = sorted(tasks, key=lambda task: (-task.num_gpus, -task.seconds, task.task_id))
        self._ids = [task.task_id for task in ordered]
        self._gpus = [task.num_gpus for task in ordered]
        self._seconds = [task.seconds for task in ordered]
        self._running: list[Load] = sorted((task.seconds, len(task.gpus)) for task in instance.running)
        self._num_gpus, self._limit, self._nodes = instance.num_gpus, limit, nodes
        area = sum(task.area for task in tasks) + sum(end * gpus for end, gpus in self._running)
        self._may_idle = self._num_gpus * limit - area
        self._dead_ends: set[tuple[int, int, tuple[int, ...], tuple[Load, ...]]] = set()
        self._starts: dict[str, int] = {}

    def run(self) -> dict[str, int] | None:
        """Starts by task id; None when no plan ends by the limit."""
        waiting = tuple(range(len(self._ids)))
        if self._is_hopeless(0, self._running, waiting):
            return None
        return self._starts if self._visit(0, self._running, waiting, idled=0, had_room=0) else None

    def _visit(self, now: int, running: list[Load], waiting: tuple[int, ...], *, idled: int, had_room: int) -> bool:
        """Whether the waiting tasks can start from now on.

        Args:
            now: a moment at which a task ended.
            running: what runs on, by its end.
            waiting: tasks not yet started.
            idled: GPU-seconds idle before now.
            had_room: GPUs that were idle since the moment before.
        """
        self._nodes.count()
        here = (now, had_room, waiting, tuple(running))
        if here in self._dead_ends:
            return False
        free = self._num_gpus - sum(gpus for _, gpus in running)
        able = [i for i in waiting if had_room < self._gpus[i] <= free]
        for started, room in self._choices(able, free):
            rest = tuple(i for i in waiting if i not in started)
            then = sorted([*running, *((now + self._seconds[i], self._gpus[i]) for i in started)])
            if self._goes_on(then, rest, now, idled, room):
                self._starts |= {self._ids[i]: now for i in started}
                return True
        self._dead_ends.add(here)
        return False

    def _goes_on(self, running: list[Load], rest: tuple[int, ...], now: int, idled: int, room: int) -> bool:
        if not rest:
            return not running or running[-1][0] <= self._limit
        if not running or all(self._gpus[i] <= room for i in rest):
            return False  # what has room now and is not started has no reason to wait
        moment = running[0][0]
        idled += room * (moment - now)
        left = [load for load in running if load[0] > moment]
        if idled > self._may_idle or self._is_hopeless(moment, left, rest):
            return False
        return self._visit(moment, left, rest, idled=idled, had_room=room)

    def _choices(self, able: Sequence[int], free: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """Every set of tasks that fits, with the GPUs that it leaves; fuller ones first."""
        if not able:
            yield (), free
            return
        first, others = able[0], able[1:]
        if self._gpus[first] <= free:
            for started, room in self._choices(others, free - self._gpus[first]):
                yield (first, *started), room
        yield from self._choices(others, free)

    def _is_hopeless(self, now: int, running: Sequence[Load], waiting: Sequence[int]) -> bool:
        """Whether some waiting task ends too late, or the times at which tasks must run need more GPUs than there are.

        A task that starts at its earliest ends at E and one that ends at the limit starts at S: from S to E it runs.
        """
        certain = [(now, end, gpus) for end, gpus in running]
        for i in waiting:
            earliest = self._earliest(now, running, self._gpus[i]) + self._seconds[i]
            if earliest > self._limit:
                return True
            if self._limit - self._seconds[i] < earliest:
                certain.append((self._limit - self._seconds[i], earliest, self._gpus[i]))
        return any(
            sum(gpus for start, end, gpus in certain if start <= moment < end) > self._num_gpus
            for moment, _, _ in certain
        )

    def _earliest(self, now: int, running: Sequence[Load], num_gpus: int) -> int:
        """When so many GPUs are free, if nothing else starts."""
        free = self._num_gpus - sum(gpus for _, gpus in running)
        for end, gpus in running:
            if free >= num_gpus:
                break
            now, free = end, free + gpus
        return now
