"""How a running task learns that it is to stop, and leaves its stages."""

from __future__ import annotations

from collections.abc import Callable

from alto_core.queue_states import StopRequest

StopQuestion = Callable[[], StopRequest | None]
"""Asks whether the task is to stop; cheap enough for every training step."""


class TaskStopped(BaseException):
    """Leaves the stages of a task that was asked to stop. No error: nothing may catch it to carry on."""

    def __init__(self, stop: StopRequest):
        super().__init__(f"asked to {stop}")
        self.stop = stop


class RunDied(TaskStopped):
    """Leaves the stages of a task whose run lost one of its processes; the task goes on in another run."""

    def __init__(self, why: str):
        super().__init__(StopRequest.PREEMPT)
        self.why = why

    def __str__(self) -> str:
        return self.why


def never() -> None:
    """The answer for a task that nobody can ask to stop."""
