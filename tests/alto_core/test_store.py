"""The store: round trips, how states may change, and several processes at once."""

from __future__ import annotations

import math
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest

from alto_core.config import TuningTask, parse_task
from alto_core.domain import JobBudget, JobState, LoraJob, Stage, TaskState
from alto_core.errors import StoreError
from alto_core.outcomes import TaskProfile
from alto_core.settings import Settings
from alto_core.store import EventDraft, JobUpdate, Store

BUDGET = JobBudget(total_steps=40, warmup_steps=4, eval_steps=(4, 40))


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    store = Store(settings)
    yield store
    store.close()


def make_task(name: str = "demo") -> TuningTask:
    return parse_task(
        {
            "name": name,
            "model": {"name": "org/tiny"},
            "data": {"source": "rows.jsonl", "test": {"rows": 20}},
            "search_space": {
                "strategy": "random",
                "learning_rate": {"min": 1e-5, "max": 1e-2},
                "lora_rank": [8, 16],
                "num_jobs": 3,
                "target_modules": [["q_proj"], ["k_proj", "v_proj"]],
            },
            "budget": {"epochs": 3},
            "early_exit": {"overrides": {"alpha": 0.2}},
        }
    )


def make_job(rate: float = 1e-3) -> LoraJob:
    return LoraJob(
        learning_rate=rate, lora_rank=8, lora_alpha=16.0, adapter_batch_size=4, target_modules=("k_proj", "q_proj")
    )


def add_task(store: Store, task_id: str = "demo-1", jobs: tuple[LoraJob, ...] = (make_job(),)) -> str:
    store.add_task(task_id, make_task(), jobs, {job.job_id: BUDGET for job in jobs})
    return task_id


def test_a_task_comes_back_as_it_was_stored(store: Store) -> None:
    add_task(store)
    record = store.task("demo-1")
    assert record.task == make_task()
    assert record.task.digest == record.digest == make_task().digest
    assert (record.state, record.stage, record.owner, record.message) == (TaskState.QUEUED, None, "me", "")
    assert record.created_at.tzinfo is not None
    assert abs(record.created_at - datetime.now(UTC)) < timedelta(minutes=1)
    assert record.started_at is None


def test_a_job_comes_back_as_it_was_stored(store: Store) -> None:
    jobs = (make_job(3e-3), make_job(1e-5), make_job(2e-4))
    add_task(store, jobs=jobs)
    records = store.jobs("demo-1")
    assert tuple(record.job for record in records) == jobs
    assert [record.job_id for record in records] == [job.job_id for job in jobs]
    first = records[0]
    assert (first.state, first.step, first.total_steps, first.warmup_steps) == (JobState.WAITING, 0, 40, 4)
    assert first.train_loss is None
    assert first.gate_rank is None


def test_jobs_may_come_after_the_task_and_twice(store: Store) -> None:
    store.add_task("demo-1", make_task())
    assert store.jobs("demo-1") == ()
    job = make_job()
    store.add_jobs("demo-1", [job], {job.job_id: BUDGET})
    store.update_jobs("demo-1", [JobUpdate(job_id=job.job_id, step=7)])
    store.add_jobs("demo-1", [job], {job.job_id: BUDGET})
    assert [record.step for record in store.jobs("demo-1")] == [7]


def test_a_task_id_is_taken_once(store: Store) -> None:
    add_task(store)
    with pytest.raises(StoreError, match="taken"):
        add_task(store)


def test_an_update_changes_what_it_names_and_nothing_else(store: Store) -> None:
    job = make_job()
    add_task(store, jobs=(job,))
    store.update_jobs("demo-1", [JobUpdate(job_id=job.job_id, state=JobState.RUNNING, step=10, val_loss=1.5)])
    store.update_jobs("demo-1", [JobUpdate(job_id=job.job_id, step=12)])
    (record,) = store.jobs("demo-1")
    assert (record.state, record.step, record.val_loss, record.train_loss) == (JobState.RUNNING, 12, 1.5, None)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 0.0, 1e300])
def test_losses_that_are_no_numbers_stay_what_they_are(store: Store, loss: float) -> None:
    job = make_job()
    add_task(store, jobs=(job,))
    store.update_jobs("demo-1", [JobUpdate(job_id=job.job_id, train_loss=loss)])
    assert store.jobs("demo-1")[0].train_loss == pytest.approx(loss, nan_ok=True, rel=0)
    store.append_events("demo-1", [EventDraft(kind="exit", text="x", numbers={"loss": loss})])
    assert store.events("demo-1")[0].numbers["loss"] == pytest.approx(loss, nan_ok=True, rel=0)


def test_a_refused_update_changes_no_job(store: Store) -> None:
    first, second = make_job(1e-3), make_job(1e-4)
    add_task(store, jobs=(first, second))
    store.update_jobs("demo-1", [JobUpdate(job_id=second.job_id, state=JobState.FINISHED)])
    with pytest.raises(StoreError, match="ended as finished"):
        store.update_jobs(
            "demo-1",
            [JobUpdate(job_id=first.job_id, step=5), JobUpdate(job_id=second.job_id, state=JobState.RUNNING)],
        )
    assert [record.step for record in store.jobs("demo-1")] == [0, 0]


@pytest.mark.parametrize("end", [state for state in JobState if state.is_end])
def test_each_end_state_of_a_job_stays(store: Store, end: JobState) -> None:
    job = make_job()
    add_task(store, jobs=(job,))
    store.update_jobs("demo-1", [JobUpdate(job_id=job.job_id, state=end, reason="because")])
    store.update_jobs("demo-1", [JobUpdate(job_id=job.job_id, state=end, best_step=3)])
    with pytest.raises(StoreError, match="Reset"):
        store.update_jobs("demo-1", [JobUpdate(job_id=job.job_id, state=JobState.RUNNING)])
    (record,) = store.jobs("demo-1")
    assert (record.state, record.reason, record.best_step) == (end, "because", 3)


def test_a_task_goes_from_queued_over_running_to_its_end(store: Store) -> None:
    add_task(store)
    store.start_task("demo-1")
    started = store.task("demo-1").started_at
    store.start_task("demo-1")  # a flow that is started again after a crash
    store.set_stage("demo-1", Stage.WARMUP)
    store.set_task_fields("demo-1", parent_run_id="run", winner_job_id="job", registered_version=3, result={"a": [1]})
    store.end_task("demo-1", TaskState.FINISHED, "all well")
    store.end_task("demo-1", TaskState.FINISHED, "again")
    record = store.task("demo-1")
    assert (record.state, record.stage, record.message) == (TaskState.FINISHED, Stage.WARMUP, "all well")
    assert (record.parent_run_id, record.winner_job_id, record.registered_version) == ("run", "job", 3)
    assert record.result == {"a": [1]}
    assert record.started_at == started
    assert record.ended_at is not None
    assert record.flow_run_id is None


def test_an_ended_task_does_not_come_back_by_itself(store: Store) -> None:
    add_task(store)
    store.start_task("demo-1")
    store.end_task("demo-1", TaskState.CANCELLED, "asked to")
    with pytest.raises(StoreError, match="Reset it first"):
        store.start_task("demo-1")
    with pytest.raises(StoreError, match="Reset it first"):
        store.set_stage("demo-1", Stage.GATE)
    with pytest.raises(StoreError, match="ended as cancelled"):
        store.end_task("demo-1", TaskState.FINISHED)
    assert store.task("demo-1").state is TaskState.CANCELLED


def test_a_reset_brings_back_the_task_and_the_named_jobs_only(store: Store) -> None:
    jobs = (make_job(1e-3), make_job(1e-4), make_job(1e-5))
    add_task(store, jobs=jobs)
    store.start_task("demo-1")
    store.update_jobs("demo-1", [JobUpdate(job_id=jobs[0].job_id, state=JobState.FINISHED)])
    store.end_task("demo-1", TaskState.FAILED, "no disk")
    states = [record.state for record in store.jobs("demo-1")]
    assert states == [JobState.FINISHED, JobState.CANCELLED, JobState.CANCELLED]
    store.reset_task("demo-1", job_ids=[jobs[1].job_id])
    assert store.task("demo-1").state is TaskState.QUEUED
    assert store.task("demo-1").ended_at is None
    states = [record.state for record in store.jobs("demo-1")]
    assert states == [JobState.FINISHED, JobState.WAITING, JobState.CANCELLED]


def test_a_finished_task_is_not_reset(store: Store) -> None:
    add_task(store)
    store.end_task("demo-1", TaskState.FINISHED)
    with pytest.raises(StoreError, match="failed or cancelled"):
        store.reset_task("demo-1")


@pytest.mark.parametrize("end", [JobState.UNDERPERFORMING, JobState.OVERFITTING, JobState.DIVERGING])
def test_a_job_that_a_policy_ended_may_run_again(store: Store, end: JobState) -> None:
    add_task(store)
    (job,) = store.jobs("demo-1")
    store.update_jobs("demo-1", [JobUpdate(job_id=job.job_id, state=end, reason="why", step=7)])
    store.reopen_job("demo-1", job.job_id)
    (job,) = store.jobs("demo-1")
    assert (job.state, job.reason, job.step) == (JobState.RUNNING, "", 7)


@pytest.mark.parametrize("state", [JobState.WAITING, JobState.FINISHED, JobState.FAILED, JobState.CANCELLED])
def test_no_other_job_may_run_again(store: Store, state: JobState) -> None:
    add_task(store)
    (job,) = store.jobs("demo-1")
    store.update_jobs("demo-1", [JobUpdate(job_id=job.job_id, state=state)])
    with pytest.raises(StoreError, match=f"got a {state.value} job to run again"):
        store.reopen_job("demo-1", job.job_id)


def test_an_unknown_task_is_refused_with_the_nearest_names(store: Store) -> None:
    with pytest.raises(StoreError, match="There is no task yet"):
        store.task("demo-1")
    for task_id in ("demo-1", "demo-2", "other-1"):
        add_task(store, task_id)
    with pytest.raises(StoreError, match=r"Did you mean demo-\d or demo-\d\?"):
        store.jobs("dmo-1")
    with pytest.raises(StoreError, match="other-1"):
        store.events("zzzzzz")


def test_an_unknown_job_is_refused(store: Store) -> None:
    add_task(store)
    with pytest.raises(StoreError, match="unknown id"):
        store.update_jobs("demo-1", [JobUpdate(job_id="nope", step=1)])


def test_events_come_back_in_order_and_from_behind_an_id(store: Store) -> None:
    add_task(store)
    add_task(store, "other-1")
    store.append_events("demo-1", [EventDraft(kind="stage", text="a"), EventDraft(kind="exit", text="b", job_id="j")])
    store.append_events("other-1", [EventDraft(kind="stage", text="not mine")])
    store.append_events("demo-1", [EventDraft(kind="gate", text="c", numbers={"survivors": 2})])
    events = store.events("demo-1")
    assert [event.text for event in events] == ["a", "b", "c"]
    assert events[1].job_id == "j"
    assert events[2].numbers == {"survivors": 2.0}
    assert [event.text for event in store.events("demo-1", after_id=events[1].event_id)] == ["c"]


def test_tasks_come_newest_first(store: Store) -> None:
    for task_id in ("a-1", "b-1", "c-1"):
        add_task(store, task_id)
    assert [record.task_id for record in store.tasks()] == ["c-1", "b-1", "a-1"]
    assert [record.task_id for record in store.tasks(limit=1)] == ["c-1"]


def test_a_profile_is_kept_and_replaced(store: Store) -> None:
    profile = TaskProfile(
        device="cpu", num_slots=4, seconds_per_step=0.5, tokens_per_second=100.0, peak_bytes=10, bytes_per_job=2
    )
    assert store.profile("key") is None
    store.save_profile("key", profile)
    store.save_profile("key", profile)
    assert store.profile("key") == profile


def test_ids_of_names_that_differ_in_case_differ_as_folders(store: Store) -> None:
    ids = [store.new_task_id(name) for name in ("demo", "Demo", "other")]
    assert ids == ["demo-1", "Demo-2", "other-1"]


def test_a_store_of_another_version_is_refused(store: Store, settings: Settings) -> None:
    with closing(sqlite3.connect(settings.home / "store.db")) as connection, connection:
        connection.execute("UPDATE alto_schema SET version = 99")
    with pytest.raises(StoreError, match=r"version 99, expected 2\. Use the ALTO version"):
        Store(settings)


def test_a_file_that_is_no_database_is_refused(settings: Settings) -> None:
    settings.home.mkdir(parents=True)
    (settings.home / "store.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(StoreError, match="ALTO_HOME"):
        Store(settings)


WORKER = """
import sys
from alto_core.domain import JobState
from alto_core.settings import load_settings
from alto_core.store import EventDraft, JobUpdate, Store

home, job_id, own_job = sys.argv[1:]
store = Store(load_settings({"ALTO_HOME": home}))
for i in range(30):
    print(store.new_task_id("shared"))
    store.update_jobs("demo-1", [JobUpdate(job_id=own_job, state=JobState.RUNNING, step=i + 1)])
    store.append_events("demo-1", [EventDraft(kind="test", text=f"{own_job} {i}")])
"""


def test_four_processes_get_ids_of_their_own_and_lose_no_update(settings: Settings) -> None:
    """They also make the database, all at once."""
    command = [sys.executable, "-c", WORKER.replace("for i in range(30)", "for i in range(0)"), str(settings.home)]
    makers = [subprocess.Popen([*command, "-", "-"]) for _ in range(4)]
    assert [maker.wait(60) for maker in makers] == [0] * 4

    store = Store(settings)
    jobs = tuple(make_job(1e-3 * (i + 1)) for i in range(4))
    add_task(store, jobs=jobs)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(settings.home), "-", job.job_id], stdout=subprocess.PIPE, text=True
        )
        for job in jobs
    ]
    outputs = [worker.communicate(timeout=120)[0].split() for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4
    ids = [task_id for output in outputs for task_id in output]
    assert sorted(ids, key=lambda i: int(i.split("-")[1])) == [f"shared-{n}" for n in range(1, 121)]
    assert [record.step for record in store.jobs("demo-1")] == [30] * 4
    assert len(store.events("demo-1")) == 120
    store.close()
