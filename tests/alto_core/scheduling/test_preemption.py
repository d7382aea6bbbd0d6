"""Who makes room for a deadline: lower classes only, as little as possible, and nobody for nothing."""

from __future__ import annotations

from alto_core.queue_states import Priority
from alto_core.scheduling.instance import Instance, RunningTask, WaitingTask
from alto_core.scheduling.preemption import tasks_to_preempt

from .conftest import hosts, task

CLASSES = {"low": Priority.BACKGROUND, "low-2": Priority.BACKGROUND, "normal": Priority.NORMAL}
DUE = task("due", 2, 10, deadline=20, priority=Priority.NORMAL)


def running(task_id: str, host: int, *gpus: int, seconds: int = 100) -> RunningTask:
    return RunningTask(task_id=task_id, host_id=f"host-{host}", gpus=gpus, seconds=seconds)


def victims(due: WaitingTask, *taken: RunningTask, sizes: tuple[int, ...] = (2,)) -> tuple[str, ...]:
    return tasks_to_preempt(Instance(hosts=hosts(*sizes), waiting=(due,), running=taken), CLASSES, [due.task_id])


def test_a_lower_class_makes_room() -> None:
    assert victims(DUE, running("low", 0, 0), running("low-2", 0, 1)) == ("low", "low-2")


def test_nobody_of_the_same_class_makes_room() -> None:
    assert victims(DUE, running("normal", 0, 0, 1)) == ()


def test_nobody_makes_room_for_a_deadline_that_is_met_or_missed_anyway() -> None:
    assert victims(DUE, running("low", 0, 0, 1, seconds=10)) == ()
    assert victims(task("due", 2, 10, deadline=9), running("low", 0, 0, 1)) == ()
    assert victims(DUE, running("low", 0, 0), running("normal", 0, 1)) == ()


def test_the_least_work_is_taken_back() -> None:
    taken = (running("low", 0, 0, 1, seconds=100), running("low-2", 1, 0, 1, seconds=60))
    assert victims(DUE, *taken, sizes=(2, 2)) == ("low-2",)


def test_a_run_that_cannot_be_asked_is_left_alone() -> None:
    assert victims(DUE, running("claimed-only", 0, 0, 1)) == ()
