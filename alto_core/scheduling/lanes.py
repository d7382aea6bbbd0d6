"""Spreads many tasks over many equal hosts: simulated annealing over static assignments.

A host with 8 GPUs is eight lanes, four pairs, two quads and one octet of lanes. A task is given a block of its size.
The tasks of a host then run one after the other, wide ones first, without idle time between them, so that the makespan
is the largest sum of durations over a lane: a partition problem without any time in it. What annealing has to lower is
the excess over the bound, the sum over lanes of max(0, load - bound)^2; each move changes it by a few additions. What
is left then sits in few lanes, while most have room below the longest: the last part of a search aims in between.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from alto_core.scheduling.effort import Effort
from alto_core.scheduling.instance import WaitingTask

HOT, COLD = 0.3, 0.08
"""First temperature, and last one times the square root of the number of lanes; as shares of the bound, squared.

Of more lanes the worst strays further from the bound at the same temperature. By trial, on 64 and on 512 lanes.
"""
NUM_SEARCHES = 3
ANNEALED = 0.7
"""Share of a search after which it is cold and aims at a target above the bound."""
TARGET = 0.7
"""That target, as a share of the way from the bound to the best makespan so far."""
ALONE_LOSS = 0.002
"""Share of all GPU time that may be lost to leaving tasks alone on their hosts.

Beside a task that takes a whole host for nearly all of the time little fits, and what is put there by chance when tasks
are still hot stays. One of the searches leaves such tasks alone.
"""
MOVE_SHARE = 0.3
"""Share of steps that move one task; the others swap two."""
STEPS_BETWEEN_LOOKS = 500
"""Steps between two looks at the clock and the makespan."""


@dataclass(frozen=True, kw_only=True)
class LaneProblem:
    """Tasks for equal hosts, each of which can run each of them."""

    tasks: Sequence[WaitingTask]
    num_hosts: int
    gpus_per_host: int
    taken: Sequence[int]
    """Seconds for which each lane is taken already; lanes of a host stand side by side."""

    def block_size(self, task: WaitingTask) -> int:
        """Power of two, so that blocks either nest or do not touch; a whole host where that is wider."""
        return min(1 << (task.num_gpus - 1).bit_length(), self.gpus_per_host)


@dataclass(frozen=True, kw_only=True)
class LaneSlot:
    """Where a task goes: a host by its number, and when."""

    host: int
    start: int


def balance_lanes(
    problem: LaneProblem, *, bound: int, seconds: float, reproducible: bool, seed: int
) -> tuple[LaneSlot, ...]:
    """Give each task a block of lanes so that the most loaded lane ends early.

    Args:
        problem: tasks and hosts.
        bound: no assignment ends earlier.
        seconds: for all searches together.
        reproducible: count steps instead of seconds.
        seed: of the first search.

    Returns:
        For each task, in their order, where it runs: wide tasks of a block before narrow ones, each as soon as the
        lanes of its block are through with those before.
    """
    searches = []
    for number in range(NUM_SEARCHES):
        # each ends in another valley, and one of them is usually good
        alone = _loners(problem, bound) if number == 1 else {}
        search = _Annealing(problem, bound, random.Random(NUM_SEARCHES * seed + number), alone)  # noqa: S311 - no secret
        search.run(Effort(seconds=seconds / NUM_SEARCHES, reproducible=reproducible))
        searches.append(search)
        if search.best <= bound:
            break
    search = min(searches, key=lambda search: search.best)
    ends = list(problem.taken)
    slots: dict[int, LaneSlot] = {}
    for i in sorted(range(len(problem.tasks)), key=lambda i: (-search.sizes[i], i)):
        block, size = search.best_blocks[i], search.sizes[i]
        start = max(ends[block : block + size])
        slots[i] = LaneSlot(host=block // problem.gpus_per_host, start=start)
        ends[block : block + size] = [start + problem.tasks[i].seconds] * size
    return tuple(slots[i] for i in range(len(problem.tasks)))


def _loners(problem: LaneProblem, bound: int) -> dict[int, int]:
    """Tasks that take a whole host for nearly all of the time, the longest first, each with a free host."""
    size = problem.gpus_per_host
    free = [host for host in range(problem.num_hosts) if not any(problem.taken[host * size : (host + 1) * size])]
    wide = [i for i, task in enumerate(problem.tasks) if problem.block_size(task) == size]
    left = ALONE_LOSS * bound * problem.num_hosts
    loners = {}
    for i in sorted(wide, key=lambda i: -problem.tasks[i].seconds)[: max(len(free) - 1, 0)]:
        left -= bound - problem.tasks[i].seconds
        if left < 0:
            break
        loners[i] = free.pop()
    return loners


class _Annealing:
    """The state of a search: which block each task has, and what that puts on each lane.

    Args:
        problem: tasks and hosts.
        bound: no assignment ends earlier.
        generator: of random numbers.
        alone: the host of each task that stays alone there, by the task's number.
    """

    def __init__(self, problem: LaneProblem, bound: int, generator: random.Random, alone: Mapping[int, int]):
        self._bound, self._target, self._generator = bound, bound, generator
        self._movable = [i for i in range(len(problem.tasks)) if i not in alone]
        self._seconds = [task.seconds for task in problem.tasks]
        self.sizes = [problem.block_size(task) for task in problem.tasks]
        self._blocks_of_size = {
            size: [
                host * problem.gpus_per_host + offset
                for host in range(problem.num_hosts)
                if host not in alone.values()
                for offset in range(0, problem.gpus_per_host - size + 1, size)
            ]
            for size in set(self.sizes)
        }
        self._tasks_of_size = {
            size: [i for i in self._movable if self.sizes[i] == size] for size in self._blocks_of_size
        }
        self._loads = list(problem.taken)
        self._blocks = [0] * len(self.sizes)
        for i, host in alone.items():
            self._blocks[i] = host * problem.gpus_per_host
            _shift(self._loads, self._blocks[i], problem.gpus_per_host, self._seconds[i])
        for i in sorted(self._movable, key=lambda i: (-self.sizes[i], -self._seconds[i])):
            size = self.sizes[i]
            block = min(self._blocks_of_size[size], key=lambda block: max(self._loads[block : block + size]))
            self._blocks[i] = block
            _shift(self._loads, block, size, self._seconds[i])
        self.best_blocks = list(self._blocks)
        self.best = max(self._loads)

    def run(self, effort: Effort) -> None:
        """Anneal until the effort is spent or the bound is met."""
        steps, cold = 0, COLD / math.sqrt(len(self._loads))
        while self.best > self._bound and self._movable and (spent := effort.spent(steps)) < 1:
            if spent < ANNEALED:
                warmth = HOT * (cold / HOT) ** (spent / ANNEALED)
            else:
                warmth = cold * (1 - spent) / (1 - ANNEALED)
                self._target = self._bound + int(TARGET * (self.best - self._bound))
            self._anneal((self._bound * warmth) ** 2)
            steps += STEPS_BETWEEN_LOOKS
            longest = max(self._loads)
            if longest < self.best:
                self.best, self.best_blocks = longest, list(self._blocks)

    def _anneal(self, temperature: float) -> None:
        """Some steps at one temperature. Names are local here because this loop is all of the time."""
        draw, exp, bound = self._generator.random, math.exp, self._target
        loads, blocks, seconds, sizes = self._loads, self._blocks, self._seconds, self.sizes
        movable, num_movable = self._movable, len(self._movable)
        for _ in range(STEPS_BETWEEN_LOOKS):
            i = movable[int(draw() * num_movable)]
            size, block = sizes[i], blocks[i]
            if draw() < MOVE_SHARE:
                targets = self._blocks_of_size[size]
                j, target, moved = -1, targets[int(draw() * len(targets))], seconds[i]
            else:
                partners = self._tasks_of_size[size]
                j = partners[int(draw() * len(partners))]
                target, moved = blocks[j], seconds[i] - seconds[j]
            if target == block or moved == 0:
                continue
            change = 0
            if size == 1:  # half of all tasks: the loops below without their cost
                over, room = loads[block] - bound, loads[target] - bound
                if over > 0:
                    change -= over * over
                if room > 0:
                    change -= room * room
                over -= moved
                room += moved
                if over > 0:
                    change += over * over
                if room > 0:
                    change += room * room
            else:
                for load in loads[block : block + size]:
                    over = load - bound
                    if over > 0:
                        change -= over * over
                    over -= moved
                    if over > 0:
                        change += over * over
                for load in loads[target : target + size]:
                    room = load - bound
                    if room > 0:
                        change -= room * room
                    room += moved
                    if room > 0:
                        change += room * room
            if change <= 0 or draw() < exp(-change / temperature):
                _shift(loads, block, size, -moved)
                _shift(loads, target, size, moved)
                blocks[i] = target
                if j >= 0:
                    blocks[j] = block


def _shift(loads: list[int], block: int, size: int, seconds: int) -> None:
    for lane in range(block, block + size):
        loads[lane] += seconds
