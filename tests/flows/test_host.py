"""The agent of a host: signs of life, runs that do not stop, runs that are gone, a plan that cannot be made."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from alto_core.config import TuningTask
from alto_core.errors import StoreError
from alto_core.queue_states import QueueState, StopRequest
from alto_core.settings import Settings
from alto_core.store import Demand, Fleet, Queue, Store
from flows import host
from flows.host import HostAgent


@pytest.fixture
def queue(settings: Settings) -> Queue:
    return Queue(settings)


@pytest.fixture
def agent(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> HostAgent:
    """Of the host `left`, which has joined, in a hurry."""
    monkeypatch.setattr(host, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(host, "KILL_AFTER_SECONDS", 0.3)
    monkeypatch.setattr(host, "REJOIN_SECONDS", 0.0)
    monkeypatch.setattr(host, "BEATS_PER_LEASE", 1000)
    agent = HostAgent(settings, host_id="left", gpus=(0,), gpu_bytes=0)
    agent.join()
    return agent


@pytest.fixture
def run_of(settings: Settings, queue: Queue, tiny_task: Callable[..., TuningTask]) -> Iterator[Callable[[], str]]:
    """Begins a run that only SIGKILL ends, of a new task."""
    started: list[subprocess.Popen[bytes]] = []

    def begin() -> str:
        command = ["sh", "-c", "trap '' TERM USR1; echo; sleep 60 & wait; wait"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdout
        process.stdout.readline()
        process.stdout.close()
        started.append(process)
        store = Store(settings)
        task_id = store.new_task_id("tiny")
        store.add_task(task_id, tiny_task())
        queue.submit(task_id, Demand(num_gpus=1, expected_seconds=60.0))
        attempt = queue.claim(task_id, "left", [0])
        assert attempt is not None
        queue.begin(task_id, attempt, process.pid)
        return task_id

    yield begin
    for process in started:
        process.kill()
        process.wait()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_that_does_not_stop_is_killed_and_its_gpu_is_free(
    agent: HostAgent, settings: Settings, queue: Queue, run_of: Callable[[], str]
) -> None:
    task_id = run_of()
    process_id = queue.entry(task_id).process_id
    with agent.watching():
        time.sleep(0.3)
        assert queue.entry(task_id).state is QueueState.RUNNING, "nobody asked it to stop"
        queue.request_stop(task_id, StopRequest.PAUSE)
        until(lambda: queue.entry(task_id).state is QueueState.PAUSED)
    assert process_id is not None
    (left,) = Fleet(settings).hosts()
    assert left.holders == {0: None}
    released = [event.text for event in queue.events(task_id=task_id) if event.kind == "released"]
    assert released == ["paused: its process is gone"]


def test_a_host_that_leaves_asks_its_runs_to_make_room(
    agent: HostAgent, settings: Settings, queue: Queue, run_of: Callable[[], str]
) -> None:
    task_id = run_of()
    with agent.watching():
        agent.leave(patience_seconds=30)
        assert queue.entry(task_id).state is QueueState.WAITING
        time.sleep(0.3)
    (left,) = Fleet(settings).hosts()
    assert left.is_lost, "no sign of life brings it back"


def test_a_host_that_stays_held_up_is_told_of_when_it_leaves(
    agent: HostAgent, queue: Queue, run_of: Callable[[], str], caplog: pytest.LogCaptureFixture
) -> None:
    task_id = run_of()
    agent.leave(patience_seconds=0)  # nobody watches, so nobody kills
    assert "1 runs on left have not stopped" in caplog.text
    assert queue.entry(task_id).stop is StopRequest.PREEMPT


def test_a_host_that_was_taken_for_lost_joins_again(agent: HostAgent, settings: Settings) -> None:
    fleet = Fleet(settings)
    before = fleet.hosts()[0].heartbeat_at
    with agent.watching():
        until(lambda: fleet.hosts()[0].heartbeat_at > before)
        fleet.leave("left")
        until(lambda: not fleet.hosts()[0].is_lost)


def test_a_plan_is_made_when_something_happens_and_an_error_is_told(
    agent: HostAgent, queue: Queue, run_of: Callable[[], str], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    reasons: list[str] = []
    monkeypatch.setattr(host, "schedule_here", reasons.append)
    agent.plan()
    agent.plan()
    assert reasons == ["start"], "nothing has happened since"
    task_id = run_of()
    agent.plan()
    assert reasons[1:] == [f"begun {task_id}"]

    def fail(reason: str) -> None:
        raise StoreError("the database is away")

    monkeypatch.setattr(host, "schedule_here", fail)
    queue.release(task_id, 1, QueueState.WAITING, "made room")
    with caplog.at_level(logging.WARNING):
        agent.plan()
    assert "not planned: the database is away" in caplog.text
