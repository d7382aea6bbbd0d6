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


def never() -> None:
    """The answer for a task that nobody can ask to stop."""
