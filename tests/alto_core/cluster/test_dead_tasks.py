"""Tasks outside of the queue whose process died, with real processes: which are ended, and which are left alone."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from alto_core.cluster.dead_tasks import DIED, end_dead_tasks
from alto_core.cluster.recovery import START_PATIENCE
from alto_core.config import parse_task
from alto_core.domain import JobState, TaskState
from alto_core.queue_states import StopRequest
from alto_core.settings import Settings
from alto_core.store import JobUpdate, Queue, Store
from alto_core.task_lock import HOLDER_NAME, held_if_free

from .conftest import BUDGET, Submit, make_job, task_content

AT_WORK = """
import sys, time
from pathlib import Path
from alto_core.task_lock import held

with held(sys.argv[1], Path(sys.argv[2])):
    print("at work", flush=True)
    time.sleep(600)
"""
Work = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def work(settings: Settings, start_process: Callable[..., subprocess.Popen[str]]) -> Work:
    """A process that is at work on a fresh running task."""

    def start(task_id: str) -> subprocess.Popen[str]:
        store, job = Store(settings), make_job()
        store.add_task(task_id, parse_task(task_content()), (job,), {job.job_id: BUDGET})
        store.start_task(task_id)
        store.update_jobs(task_id, [JobUpdate(job_id=job.job_id, state=JobState.RUNNING, step=3)])
        store.close()
        process = start_process(AT_WORK, task_id, str(settings.task_folder(task_id)))
        assert process.stdout and process.stdout.readline() == "at work\n"
        return process

    return start


def test_a_killed_process_leaves_a_failed_task_and_a_living_one_is_left_alone(settings: Settings, work: Work) -> None:
    dead, alive = work("dead-1"), work("alive-1")
    assert end_dead_tasks(settings) == ()
    dead.kill()
    dead.wait()
    (finding,) = end_dead_tasks(settings)
    assert (finding.task_id, finding.text) == ("dead-1", f"task dead-1: {DIED}; failed")
    store = Store(settings)
    assert (store.task("dead-1").state, store.task("dead-1").message) == (TaskState.FAILED, DIED)
    assert [record.state for record in store.jobs("dead-1")] == [JobState.CANCELLED]
    assert store.task("alive-1").state is TaskState.RUNNING
    assert alive.poll() is None
    assert end_dead_tasks(settings) == (), "once"


def test_a_task_of_another_machine_is_left_to_it(settings: Settings, work: Work) -> None:
    process = work("away-1")
    process.kill()
    process.wait()
    holder = settings.task_folder("away-1") / HOLDER_NAME
    content = json.loads(holder.read_text())
    assert content["host"] == socket.gethostname()
    holder.write_text(json.dumps(content | {"host": "elsewhere"}))
    assert end_dead_tasks(settings) == ()
    assert Store(settings).task("away-1").state is TaskState.RUNNING


def test_tasks_of_the_queue_and_tasks_in_preparation_are_left_alone(
    settings: Settings, queue: Queue, submit: Submit
) -> None:
    submit("waits-1")
    submit("runs-1")
    submit("cancelled-1")
    queue.request_stop("cancelled-1", StopRequest.CANCEL)
    queue.claim("runs-1", "left", [0])
    Store(settings).start_task("runs-1")
    Store(settings).add_task("fresh-1", parse_task(task_content()))
    for task_id in ("waits-1", "runs-1", "fresh-1"):
        settings.task_folder(task_id).mkdir(parents=True)
    assert end_dead_tasks(settings) == ()
    later = datetime.now(UTC) + START_PATIENCE + timedelta(seconds=1)
    with held_if_free(settings.task_folder("fresh-1")) as is_held:
        assert is_held
        assert [finding.task_id for finding in end_dead_tasks(settings, later)] == ["cancelled-1"], (
            "one prepares for long"
        )
    assert [finding.task_id for finding in end_dead_tasks(settings, later)] == ["fresh-1"]
    assert Store(settings).task("cancelled-1").state is TaskState.CANCELLED
    assert Store(settings).task("runs-1").state is TaskState.RUNNING
    assert Store(settings).task("waits-1").state is TaskState.QUEUED
