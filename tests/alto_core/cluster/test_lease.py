"""A run's hold on its GPUs, with real processes: begun once, given back, given up, stopped."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from alto_core.cluster.lease import GIVEN_UP_EXIT_CODE, held_gpus, outliving_ranks
from alto_core.cluster.recovery import MAX_FAILURES, recover
from alto_core.domain import JobState, TaskState
from alto_core.errors import RankLostError, StoreError
from alto_core.interruption import RunDied, TaskStopped
from alto_core.queue_states import QueueState, StopRequest
from alto_core.settings import Settings
from alto_core.store import Fleet, JobUpdate, Queue, QueueEntry, Store
from tests.conftest import NO_PROCESS

from .conftest import Submit, wait_until

HOLDER = """
import sys, time
from alto_core.cluster.lease import held_gpus
from alto_core.interruption import TaskStopped
from alto_core.settings import load_settings

try:
    with held_gpus(sys.argv[1], int(sys.argv[2]), load_settings()):
        print("holds", flush=True)
        while True:
            time.sleep(0.05)
except TaskStopped as stopped:
    print(stopped, flush=True)
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def hold(settings: Settings, start_process: Start, queue: Queue) -> Callable[..., subprocess.Popen[str]]:
    """A process that holds the GPUs of a fresh claim, and has begun."""

    def start(task_id: str, *gpus: int, lease_seconds: float = 5, program: str = HOLDER) -> subprocess.Popen[str]:
        attempt = queue.claim(task_id, "left", gpus)
        assert attempt is not None
        environment = {
            "ALTO_HOME": str(settings.home),
            "ALTO_LEASE_SECONDS": str(lease_seconds),
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        }
        process = start_process(program, task_id, str(attempt), **environment)
        assert process.stdout and process.stdout.readline() == "holds\n"
        return process

    return start


def free_gpus(settings: Settings) -> list[tuple[str, int]]:
    return [(host.host_id, gpu) for host in Fleet(settings).hosts() for gpu, task in host.holders.items() if not task]


def test_a_task_that_lost_a_rank_waits_again_until_that_happened_too_often(
    settings: Settings, queue: Queue, submit: Submit
) -> None:
    submit("wide-1", num_gpus=2)
    for number in range(1, MAX_FAILURES + 1):
        attempt = queue.claim("wide-1", "left", [0, 1])
        assert attempt is not None
        expected: type[BaseException] = RunDied if number < MAX_FAILURES else RankLostError
        with (
            pytest.raises(expected, match="rank 1 of 2 was lost"),
            held_gpus("wide-1", attempt, settings, {"CUDA_VISIBLE_DEVICES": "0,1"}) as entry,
            outliving_ranks(entry),
        ):
            raise RankLostError("rank 1 of 2 was lost")
        there = queue.entry("wide-1")
        assert there.state is (QueueState.WAITING if number < MAX_FAILURES else QueueState.ENDED)
        assert there.num_failures == min(number, MAX_FAILURES - 1)
    with pytest.raises(RankLostError), outliving_ranks(None):
        raise RankLostError("told to who started it")


def test_gpus_are_given_back_however_the_run_ends(settings: Settings, queue: Queue, submit: Submit) -> None:
    for task_id, error in (("ok-1", None), ("bad-1", ValueError("x")), ("cut-1", KeyboardInterrupt())):
        submit(task_id)
        attempt = queue.claim(task_id, "left", [1])
        assert attempt is not None
        try:
            with held_gpus(task_id, attempt, settings, {"CUDA_VISIBLE_DEVICES": "1"}) as entry:
                assert (entry.gpus, entry.state) == ((1,), QueueState.RUNNING)
                assert len(free_gpus(settings)) == 3
                with pytest.raises(StoreError, match="A task runs once at a time"):
                    queue.begin(task_id, attempt, NO_PROCESS)
                if error is not None:
                    raise error
        except (ValueError, KeyboardInterrupt):
            assert error is not None
        assert queue.entry(task_id).state is QueueState.ENDED
        assert Store(settings).task(task_id).state.is_end, "nobody else is left to record its end"
        assert len(free_gpus(settings)) == 4


def test_a_run_waits_for_the_process_that_used_its_gpus_before(
    settings: Settings, queue: Queue, submit: Submit, start_process: Start
) -> None:
    """Memory of a GPU is free when the process is gone, which is later than its last word to the store."""
    submit("first-1")
    submit("second-1")
    lingering = start_process("import time; time.sleep(600)")
    queue.claim("first-1", "left", [0])
    queue.begin("first-1", 1, lingering.pid)
    queue.release("first-1", 1, QueueState.ENDED, "done")
    assert queue.claim("second-1", "left", [0]) == 1
    timer = threading.Timer(1.0, lambda: (lingering.kill(), lingering.wait()))
    timer.start()
    with held_gpus("second-1", 1, settings, {"CUDA_VISIBLE_DEVICES": "0"}):
        assert lingering.poll() is not None
    timer.join()


@pytest.mark.parametrize("visible", ["0", "0,1", "", None])
def test_a_process_that_sees_other_gpus_than_claimed_does_not_run(
    settings: Settings, queue: Queue, submit: Submit, visible: str | None
) -> None:
    submit("demo-1")
    attempt = queue.claim("demo-1", "left", [1])
    assert attempt is not None
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with (
        pytest.raises(StoreError, match="expected '1', the GPUs claimed on left"),
        held_gpus("demo-1", attempt, settings, environment),
    ):
        raise AssertionError("it ran")
    assert len(free_gpus(settings)) == 4


@pytest.mark.parametrize(
    ("stop", "state"), [(StopRequest.PAUSE, QueueState.PAUSED), (StopRequest.PREEMPT, QueueState.WAITING)]
)
def test_a_run_that_asks_nothing_is_interrupted_when_its_grace_is_over(
    settings: Settings, queue: Queue, submit: Submit, hold: Start, stop: StopRequest, state: QueueState
) -> None:
    submit("demo-1")
    process = hold("demo-1", 0)
    queue.request_stop("demo-1", stop)
    output, _ = process.communicate(timeout=30)
    assert (output, process.returncode) == (f"asked to {stop}\n", 0)
    assert queue.entry("demo-1").state is state
    assert len(free_gpus(settings)) == 4


def test_a_run_that_gets_sigterm_makes_room_at_once(
    settings: Settings, queue: Queue, submit: Submit, hold: Start
) -> None:
    submit("demo-1")
    process = hold("demo-1", 0)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert (output, process.returncode) == ("asked to preempt\n", 0)
    assert queue.entry("demo-1").state is QueueState.WAITING
    assert Store(settings).task("demo-1").state is TaskState.QUEUED
    assert len(free_gpus(settings)) == 4


IN_CLEAN_UP = """
import sys, time
from alto_core.cluster.lease import held_gpus
from alto_core.interruption import TaskStopped
from alto_core.settings import load_settings

class Slow:
    def __del__(self) -> None:
        print("holds", flush=True)
        time.sleep(600)

try:
    with held_gpus(sys.argv[1], int(sys.argv[2]), load_settings()):
        Slow()
        while True:
            time.sleep(0.05)
except TaskStopped as stopped:
    print(stopped, flush=True)
"""


def test_an_interrupt_that_python_swallows_comes_again(
    settings: Settings, queue: Queue, submit: Submit, hold: Start
) -> None:
    """What is raised while an object is cleaned up does not leave its `__del__`."""
    submit("demo-1")
    process = hold("demo-1", 0, program=IN_CLEAN_UP)
    process.terminate()
    output, _ = process.communicate(timeout=120)
    assert (output, process.returncode) == ("asked to preempt\n", 0)
    assert queue.entry("demo-1").state is QueueState.WAITING


SLOW_INTERRUPT = """
import signal, sys, threading, time
from alto_core.cluster import lease
from alto_core.domain import TaskState
from alto_core.settings import load_settings
from alto_core.store import Store

decided, send = threading.Event(), signal.pthread_kill

def send_late(thread: int, number: int) -> None:
    decided.set()
    keeper = threading.current_thread()
    while not keeper._closing:  # until the block is being left
        time.sleep(0.01)
    time.sleep(0.3)
    send(thread, number)

lease.signal.pthread_kill = send_late
with lease.held_gpus(sys.argv[1], int(sys.argv[2]), load_settings()):
    print("holds", flush=True)
    decided.wait()
    Store(load_settings()).end_task(sys.argv[1], TaskState.FINISHED)
print("goes on", flush=True)
"""


def test_an_interrupt_that_was_decided_on_when_the_run_ended_does_not_end_the_process(
    settings: Settings, queue: Queue, submit: Submit, hold: Start
) -> None:
    """Between the keeper's decision and its signal the block is left, and the handler of before would be met."""
    submit("demo-1")
    process = hold("demo-1", 0, program=SLOW_INTERRUPT)
    queue.request_stop("demo-1", StopRequest.PAUSE)
    output, _ = process.communicate(timeout=60)
    assert (output, process.returncode) == ("goes on\n", 0)
    assert queue.entry("demo-1").state is QueueState.ENDED
    assert Store(settings).task("demo-1").state is TaskState.FINISHED


def test_a_task_that_ended_in_its_last_second_is_not_paused(settings: Settings, queue: Queue, submit: Submit) -> None:
    submit("demo-1")
    attempt = queue.claim("demo-1", "left", [0])
    assert attempt is not None
    with (
        pytest.raises(TaskStopped),
        held_gpus("demo-1", attempt, settings, {"CUDA_VISIBLE_DEVICES": "0"}),
    ):
        Store(settings).end_task("demo-1", TaskState.FINISHED)
        raise TaskStopped(StopRequest.PAUSE)
    assert queue.entry("demo-1").state is QueueState.ENDED


def test_a_run_that_was_given_up_does_not_end_the_task_of_the_run_after_it(
    settings: Settings, queue: Queue, submit: Submit
) -> None:
    submit("demo-1")
    attempt = queue.claim("demo-1", "left", [0])
    assert attempt is not None
    with (
        pytest.raises(KeyboardInterrupt),
        held_gpus("demo-1", attempt, settings, {"CUDA_VISIBLE_DEVICES": "0"}),
    ):
        queue.release("demo-1", attempt, QueueState.WAITING, "no sign of life", died=True)
        assert queue.claim("demo-1", "right", [0]) == attempt + 1
        raise KeyboardInterrupt
    assert Store(settings).task("demo-1").state is TaskState.QUEUED
    assert queue.entry("demo-1").state is QueueState.CLAIMED


def test_a_run_that_was_given_up_ends_its_process(
    queue: Queue, submit: Submit, hold: Start, settings: Settings
) -> None:
    """A host that was lost and comes back: its run must not go on beside the new one."""
    submit("demo-1")
    process = hold("demo-1", 0)
    queue.release("demo-1", 1, QueueState.WAITING, "no sign of life", died=True)
    assert queue.claim("demo-1", "right", [0]) == 2
    assert process.wait(30) == GIVEN_UP_EXIT_CODE
    entry = queue.entry("demo-1")
    assert (entry.attempt, entry.state, entry.host_id) == (2, QueueState.CLAIMED, "right")


def test_the_gpus_of_a_killed_run_are_free_when_its_lease_is_over_and_the_task_waits(
    settings: Settings, queue: Queue, submit: Submit, hold: Start
) -> None:
    job = submit("demo-1")
    submit("other-1")
    process = hold("demo-1", 0)
    alive = hold("other-1", 1)
    Store(settings).start_task("demo-1")
    Store(settings).update_jobs("demo-1", [JobUpdate(job_id=job.job_id, state=JobState.RUNNING, step=30)])
    marker = settings.task_folder("demo-1") / "jobs" / job.job_id / "state" / "step-00000020" / "complete.json"
    marker.parent.mkdir(parents=True)
    marker.write_text("{}")
    process.kill()
    process.wait()
    assert recover(settings) == (), "silence that short can be a busy disk"
    later = datetime.now(UTC) + timedelta(seconds=settings.lease_seconds + 1)
    queue.beat("other-1", 1)
    (finding,) = recover(settings, now=later - timedelta(seconds=2), is_gone=lambda entry: entry.task_id == "demo-1")
    assert "its process is gone; waits to go on from its last checkpoint" in finding.text
    assert queue.entry("demo-1").state is QueueState.WAITING
    assert Store(settings).task("demo-1").state is TaskState.QUEUED
    (record,) = Store(settings).jobs("demo-1")
    assert (record.state, record.step) == (JobState.WAITING, 20), "back at its checkpoint"
    assert ("left", 0) in free_gpus(settings)
    assert alive.poll() is None
    assert queue.entry("other-1").state is QueueState.RUNNING


def test_silence_for_a_lease_is_death(settings: Settings, queue: Queue, submit: Submit) -> None:
    submit("demo-1")
    submit("slow-1")
    queue.claim("demo-1", "left", [0])
    queue.begin("demo-1", 1, NO_PROCESS)
    queue.claim("slow-1", "left", [1])
    later = datetime.now(UTC) + timedelta(seconds=settings.lease_seconds + 1)
    (finding,) = recover(settings, now=later)
    assert (finding.task_id, "no sign of life since" in finding.text) == ("demo-1", True)
    (slow,) = recover(settings, now=datetime.now(UTC) + timedelta(minutes=6))
    assert "its run did not begin" in slow.text
    assert len(free_gpus(settings)) == 4


def test_a_healthy_run_that_prefect_takes_for_crashed_goes_on(
    settings: Settings, queue: Queue, submit: Submit, hold: Start
) -> None:
    submit("demo-1")
    process = hold("demo-1", 0)
    queue.note_flow_run("demo-1", 1, "flow-run")
    before = queue.entry("demo-1").heartbeat_at
    wait_until(lambda: queue.entry("demo-1").heartbeat_at != before)
    assert recover(settings, ended_flow_runs={"flow-run": "Crashed"}) == ()
    assert process.poll() is None
    process.kill()
    process.wait()
    soon = datetime.now(UTC) + timedelta(seconds=11)
    assert "ended as Crashed" in recover(settings, ended_flow_runs={"flow-run": "Crashed"}, now=soon)[0].text


def test_a_silent_host_is_lost_and_a_task_whose_runs_keep_dying_fails(
    settings: Settings, queue: Queue, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[tuple[str, TaskState]] = []

    def record_end(workspace: object, state: TaskState, message: str) -> None:
        ends.append((message, state))
        Store(settings).end_task("demo-1", state, message)

    monkeypatch.setattr("alto_core.lifecycle.end_task", record_end)  # no MLflow run was made for it
    submit("demo-1")

    def is_gone(entry: QueueEntry) -> bool:
        return True

    for attempt in range(1, MAX_FAILURES + 1):
        assert queue.claim("demo-1", "left", [0]) == attempt
        queue.begin("demo-1", attempt, NO_PROCESS)
        recover(settings, is_gone=is_gone)
    assert queue.entry("demo-1").state is QueueState.ENDED
    assert ends == [(f"{MAX_FAILURES} runs died, the last one: its process is gone", TaskState.FAILED)]
    later = datetime.now(UTC) + timedelta(seconds=settings.lease_seconds + 1)
    monkeypatch.setattr("alto_core.store.fleet._now", lambda: later)
    assert {finding.host_id for finding in recover(settings, now=later)} == {"left", "right"}
    assert all(host.is_lost for host in Fleet(settings).hosts())


def test_a_stop_is_no_error_that_something_could_catch() -> None:
    assert not issubclass(TaskStopped, Exception)
