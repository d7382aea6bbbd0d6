"""How many GPUs of one host are free, from now to the end of time."""

from __future__ import annotations

from bisect import bisect_right


class HostTimeline:
    """A step function: from `times[i]` on, `free[i]` GPUs are free. The last step lasts for ever."""

    def __init__(self, num_gpus: int):
        self.times = [0]
        self.free = [num_gpus]

    def free_at(self, time: int) -> int:
        return self.free[bisect_right(self.times, time) - 1]

    def is_free(self, num_gpus: int, start: int, end: int) -> bool:
        """Whether so many GPUs are free all the way from `start` to `end`."""
        step = bisect_right(self.times, start) - 1
        while step < len(self.times) and self.times[step] < end:
            if self.free[step] < num_gpus:
                return False
            step += 1
        return True

    def earliest(self, num_gpus: int, seconds: int, release: int) -> int:
        """The first time from `release` on at which so many GPUs are free for so long."""
        step = bisect_right(self.times, release) - 1
        start = release
        while step < len(self.times):
            if self.free[step] < num_gpus:
                start = self.times[step + 1]
            elif step + 1 == len(self.times) or self.times[step + 1] >= start + seconds:
                return start
            step += 1
        raise AssertionError("the last step of a timeline has all GPUs free")

    def book(self, num_gpus: int, start: int, end: int) -> None:
        """Take so many GPUs from `start` to `end`."""
        first, last = self._cut(start), self._cut(end)
        for step in range(first, last):
            self.free[step] -= num_gpus
            assert self.free[step] >= 0, "more GPUs booked than there are"

    def _cut(self, time: int) -> int:
        """Index of the step that begins at this time, made where there is none."""
        step = bisect_right(self.times, time) - 1
        if self.times[step] != time:
            step += 1
            self.times.insert(step, time)
            self.free.insert(step, self.free[step - 1])
        return step
