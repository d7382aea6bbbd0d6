"""Queued tasks through their flow: claimed, run once, paused and gone on with, dispatched by the scheduler."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from prefect.states import Cancelling, Crashed, Running

from alto_core.cluster import stop
from alto_core.cluster.recovery import recover
from alto_core.config import TuningTask
from alto_core.domain import JobState, TaskState
from alto_core.errors import StoreError
from alto_core.preparation import create_task, plan_task
from alto_core.queue_states import QueueState, StopRequest
from alto_core.settings import load_settings
from alto_core.store import Demand, Fleet, Queue, Store
from alto_core.tracking import Tracker
from flows.deployments import deploy_host
from flows.reconcile import sweep, take_back
from flows.resume import resume
from flows.schedule import schedule, schedule_here
from flows.tune import tune_queued, tune_result
from tests.conftest import NO_PROCESS

pytestmark = [pytest.mark.usefixtures("prefect_server", "workspace_home"), pytest.mark.slow]


@pytest.fixture
def task(tiny_task: Callable[..., TuningTask]) -> TuningTask:
    """Three jobs, one of which diverges."""
    space = {"learning_rate": [1e-3, 1e-2, 1e30], "lora_rank": 4, "adapter_batch_size": 4}
    budget = {"steps": 12, "eval_interval_fraction": 0.25, "gate_warmup_fraction": 0.25}
    return tiny_task(search_space=space, budget=budget)


@pytest.fixture
def queue() -> Iterator[Queue]:
    settings = load_settings()
    Fleet(settings).join("left", gpus=(0, 1), gpu_bytes=0, work_pool="alto-left")
    queue = Queue(settings)
    yield queue
    queue.close()


def submit(task: TuningTask, queue: Queue, num_gpus: int = 1) -> str:
    settings = load_settings()
    task_id = Store(settings).new_task_id(task.name)
    create_task(plan_task(task), task_id, settings)
    queue.submit(task_id, Demand(num_gpus=num_gpus, expected_seconds=60.0))
    return task_id


def holders() -> list[str | None]:
    return [task_id for host in Fleet(load_settings()).hosts() for task_id in host.holders.values()]


def claim(queue: Queue, task_id: str, monkeypatch: pytest.MonkeyPatch) -> int:
    attempt = queue.claim(task_id, "left", [1])
    assert attempt is not None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    return attempt


def test_a_paused_task_goes_on_from_its_checkpoint_to_the_same_result(
    task: TuningTask, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "LOOK_SECONDS", 0.0)
    whole, paused = (submit(task, queue) for _ in range(2))
    tune_queued(whole, claim(queue, whole, monkeypatch))
    assert queue.entry(whole).state is QueueState.ENDED
    assert holders() == [None, None]

    asked = Store.update_jobs

    def ask_at_step_nine(store: Store, task_id: str, updates: list) -> None:  # type: ignore[type-arg]
        asked(store, task_id, updates)
        if any(update.step == 9 for update in updates):
            queue.request_stop(task_id, StopRequest.PAUSE)

    monkeypatch.setattr(Store, "update_jobs", ask_at_step_nine)
    state = tune_queued(paused, claim(queue, paused, monkeypatch), return_state=True)
    assert (state.name, state.message) == ("Cancelled", "asked to pause")
    assert queue.entry(paused).state is QueueState.PAUSED
    assert Store(load_settings()).task(paused).state is TaskState.QUEUED
    assert holders() == [None, None]
    steps = [record.step for record in Store(load_settings()).jobs(paused) if record.state is JobState.WAITING]
    assert 10 in steps, "the joint step after the one at which it was asked"

    monkeypatch.setattr(Store, "update_jobs", asked)
    with pytest.raises(StoreError, match=r"in the queue of the cluster, paused\. `alto unpause` lets it go on"):
        resume(paused)
    queue.unpause(paused)
    with pytest.raises(StoreError, match=r"in the queue of the cluster, waiting\. It goes on by itself"):
        resume(paused)
    tune_queued(paused, claim(queue, paused, monkeypatch))
    columns = ["job_id", "state", "step", "gate_rank", "best_val_loss"]
    ours, theirs = (tune_result(task_id).leaderboard[columns] for task_id in (paused, whole))
    assert ours.equals(theirs)
    assert Store(load_settings()).task(paused).state is TaskState.FINISHED


def test_a_cancelled_run_ends_everywhere_and_keeps_its_checkpoints(
    task: TuningTask, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "LOOK_SECONDS", 0.0)
    task_id = submit(task, queue)
    asked = Store.update_jobs

    def ask_at_step_nine(store: Store, task_id: str, updates: list) -> None:  # type: ignore[type-arg]
        asked(store, task_id, updates)
        if any(update.step == 9 for update in updates):
            queue.request_stop(task_id, StopRequest.CANCEL)

    monkeypatch.setattr(Store, "update_jobs", ask_at_step_nine)
    assert tune_queued(task_id, claim(queue, task_id, monkeypatch), return_state=True).name == "Cancelled"
    assert queue.entry(task_id).state is QueueState.ENDED
    assert Store(load_settings()).task(task_id).state is TaskState.CANCELLED
    assert holders() == [None, None]
    assert list(load_settings().task_folder(task_id).glob("jobs/*/state/step-*/complete.json"))
    open_jobs = [r for r in Store(load_settings()).jobs(task_id) if r.state is JobState.CANCELLED]
    runs = Tracker(load_settings()).task_runs(task_id)
    assert open_jobs
    assert set(runs.job_run_ids) >= {record.job_id for record in open_jobs}


def test_sigterm_makes_room_and_a_flow_run_cancelled_in_prefect_cancels_its_task(
    task: TuningTask, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    task_id = submit(task, queue)
    asked, states = Store.update_jobs, [None, Cancelling()]

    def terminate_at_step_nine(store: Store, task_id: str, updates: list) -> None:  # type: ignore[type-arg]
        asked(store, task_id, updates)
        if any(update.step == 9 for update in updates) and states:
            state = states.pop(0)
            if state is not None:
                with get_client(sync_client=True) as client:
                    client.set_flow_run_state(UUID(flow_run.id), state, force=True)
            assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None), "it would end this test"
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Store, "update_jobs", terminate_at_step_nine)
    first = tune_queued(task_id, claim(queue, task_id, monkeypatch), return_state=True)
    assert (first.name, first.message) == ("Cancelled", "asked to preempt")
    assert queue.entry(task_id).state is QueueState.WAITING
    assert Store(load_settings()).task(task_id).state is TaskState.QUEUED
    assert holders() == [None, None]
    second = tune_queued(task_id, claim(queue, task_id, monkeypatch), return_state=True)
    assert (second.name, second.message) == ("Cancelled", "asked to cancel")
    assert queue.entry(task_id).state is QueueState.ENDED
    assert Store(load_settings()).task(task_id).state is TaskState.CANCELLED
    assert not states


def test_a_flow_refuses_to_start_twice(task: TuningTask, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    task_id = submit(task, queue)
    attempt = claim(queue, task_id, monkeypatch)
    queue.begin(task_id, attempt, NO_PROCESS)
    with pytest.raises(StoreError, match="A task runs once at a time"):
        tune_queued(task_id, attempt)
    assert queue.entry(task_id).state is QueueState.RUNNING, "the first one is not disturbed"


def test_two_schedulers_dispatch_what_starts_now_once(task: TuningTask, queue: Queue) -> None:
    deploy_host("left")
    task_ids = [submit(task, queue) for _ in range(3)]
    dispatched = [*schedule_here("test"), *schedule("test")]
    assert len(dispatched) == len(set(dispatched)) == 2, "there are two GPUs"
    entries = queue.entries(QueueState.CLAIMED)
    assert {entry.flow_run_id for entry in entries} == set(dispatched)
    assert {entry.gpus for entry in entries} == {(0,), (1,)}
    assert [entry.task_id for entry in queue.entries(QueueState.WAITING)] == task_ids[2:]
    with get_client(sync_client=True) as client:
        for entry in entries:
            run = client.read_flow_run(UUID(entry.flow_run_id or ""))
            assert run.job_variables == {"env": {"CUDA_VISIBLE_DEVICES": str(entry.gpus[0])}}
            assert run.parameters == {"task_id": entry.task_id, "attempt": 1}, "ids, whatever the size of the task"
            assert run.work_pool_name == "alto-left"


def test_a_host_that_takes_no_run_gets_its_gpus_back(task: TuningTask, queue: Queue) -> None:
    Fleet(load_settings()).join("nowhere", gpus=(0, 1, 2), gpu_bytes=0, work_pool="alto-nowhere")
    task_id = submit(task, queue, num_gpus=3)
    assert schedule_here("test") == []
    entry = queue.entry(task_id)
    assert (entry.state, entry.attempt, entry.num_failures) == (QueueState.WAITING, 1, 0)
    assert set(holders()) == {None}


def test_a_flow_run_that_ended_without_a_word_is_taken_back_and_one_left_running_is_marked(
    task: TuningTask, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed with its worker: Prefect shows it as Running for ever."""
    deploy_host("left")
    task_id = submit(task, queue)
    (run_id,) = schedule_here("test")
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(UUID(run_id), Running(), force=True)
    queue.begin(task_id, 1, NO_PROCESS)
    assert take_back() == ()
    monkeypatch.setenv("ALTO_LEASE_SECONDS", "5")
    import time

    time.sleep(5.5)
    (finding,) = [found for found in take_back() if found.task_id == task_id]
    assert "no sign of life" in finding.text
    assert queue.entry(task_id).state is QueueState.WAITING
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(UUID(run_id)).state
    assert state is not None
    assert (state.name, state.message) == (Crashed().name, finding.text)


def test_a_dead_run_that_somebody_else_took_back_is_marked_in_prefect(
    task: TuningTask, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent of a host takes runs back without Prefect, and a worker that was lost with its host says nothing."""
    deploy_host("left")
    dead, alive = submit(task, queue), submit(task, queue)
    run_ids = schedule_here("test")
    with get_client(sync_client=True) as client:
        for run_id in run_ids:
            client.set_flow_run_state(UUID(run_id), Running(), force=True)
    for task_id in (dead, alive):
        queue.begin(task_id, 1, NO_PROCESS)
    before = queue.entry(dead).flow_run_id
    with monkeypatch.context() as patch:
        patch.setattr("alto_core.store.queue_rows.now", lambda: datetime.now(UTC) - timedelta(minutes=2))
        recover(load_settings(), is_gone=lambda entry: entry.task_id == dead)
    assert queue.entry(dead).state is QueueState.WAITING
    sweep()
    with get_client(sync_client=True) as client:
        states = {run_id: client.read_flow_run(UUID(run_id)).state for run_id in run_ids}
    assert {run_id for run_id, state in states.items() if state and state.is_crashed()} == {before}
    assert {state.message for state in states.values() if state and state.is_crashed()} == {
        f"attempt 1 of task {dead} was given up"
    }
