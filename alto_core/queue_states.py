"""Words of the queue: how pressing a task is, where it is between the queue and the GPUs, what it is asked to do."""

from __future__ import annotations

from enum import StrEnum


class Priority(StrEnum):
    """How pressing a task is. Tasks of a class are planned before those of the classes after it."""

    URGENT = "urgent"
    NORMAL = "normal"
    BACKGROUND = "background"


class QueueState(StrEnum):
    """Where a submitted task is between the queue and the GPUs."""

    WAITING = "waiting"
    """For GPUs."""
    CLAIMED = "claimed"
    """GPUs are taken for it and a run was asked for; the run has not begun."""
    RUNNING = "running"
    PAUSED = "paused"
    """By a person; keeps its place and its checkpoints, and no GPU."""
    ENDED = "ended"

    @property
    def holds_gpus(self) -> bool:
        return self in (QueueState.CLAIMED, QueueState.RUNNING)


class StopRequest(StrEnum):
    """What a running task is asked to do at once."""

    CANCEL = "cancel"
    """End; checkpoints stay."""
    PAUSE = "pause"
    """Give the GPUs back and stay away from them until someone says otherwise."""
    PREEMPT = "preempt"
    """Give the GPUs back and wait for others."""
