"""`alto up`: a task that waits is tuned by a real worker in the folder where the command was typed, and is told of."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from alto_core.config import TuningTask
from alto_core.domain import TaskState
from alto_core.preparation import create_task, plan_task
from alto_core.queue_states import QueueState, StopRequest
from alto_core.settings import Settings, load_settings
from alto_core.store import Demand, Fleet, Queue, Store
from flows.cli.queue_log import QueueLog

REPOSITORY = Path(__file__).resolve().parents[3]


def test_a_host_tells_what_happens_on_it_and_nothing_twice(settings: Settings, task: TuningTask) -> None:
    fleet, queue, store = Fleet(settings), Queue(settings), Store(settings)
    for host in ("left", "right"):
        fleet.join(host, gpus=(0, 1), gpu_bytes=0, work_pool=f"alto-{host}")
    log = QueueLog(settings, "left")
    for task_id, host in (("made-1", "left"), ("made-2", "right")):
        store.add_task(task_id, task)
        queue.submit(task_id, Demand(num_gpus=1, expected_seconds=60.0))
        queue.claim(task_id, host, [1])
    assert [line.split("UTC  ")[1] for line in log.new_lines()] == [
        "made-1: submitted, 1 GPU, normal",
        "made-1: claimed, GPU 1 of left, attempt 1",
        "made-2: submitted, 1 GPU, normal",
    ]
    queue.request_stop("made-1", StopRequest.PAUSE)
    assert [line.split("UTC  ")[1] for line in log.new_lines()] == [
        "made-1: asked to pause, claimed",
        "made-1: released, paused: asked to pause before its run began",
    ]
    assert list(log.new_lines()) == []


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("prefect_server")
def test_a_waiting_task_is_tuned_in_the_folder_where_the_host_was_started(
    tiny_task: Callable[..., TuningTask], empty_database: Path, tmp_path: Path
) -> None:
    settings = load_settings({"ALTO_HOME": str(tmp_path / ".alto"), "ALTO_DEVICE": "cpu"})
    settings.make_home()
    shutil.copy(empty_database, settings.home / "mlflow.db")
    space = {"learning_rate": 1e-2, "lora_rank": 4, "adapter_batch_size": 4}
    store, queue = Store(settings), Queue(settings)
    create_task(plan_task(tiny_task(search_space=space, budget={"steps": 4})), "tiny-1", settings)
    queue.submit("tiny-1", Demand(num_gpus=1, expected_seconds=60.0))

    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "ALTO_DEVICE": "cpu", "COLUMNS": "200"}
    environment["PREFECT_API_URL"] = str(PREFECT_API_URL.value())
    for name in ("ALTO_HOME", "MLFLOW_TRACKING_URI"):
        environment.pop(name, None)
    command = [sys.executable, "-c", "from flows.cli.app import main; main()", "up", "--host", "tried", "--gpus", "0"]
    host = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    assert host.stdout
    try:
        told = ""
        while line := host.stdout.readline():
            told += line
            if "tiny-1: released" in line:
                break
        host.send_signal(signal.SIGINT)
        told += host.communicate()[0]
    finally:
        host.terminate()
        host.wait(60)
    assert store.task("tiny-1").state is TaskState.FINISHED, told
    assert queue.entry("tiny-1").state is QueueState.ENDED
    assert "tried: 1 GPU ready" in told and f"ALTO_HOME={settings.home}" in told
    assert "tiny-1: claimed, GPU 0 of tried, attempt 1" in told
    assert "tiny-1: released, ended: finished" in told
    assert "Stopping" in told and host.returncode == 0
    (left,) = Fleet(settings).hosts()
    assert left.is_lost and left.holders == {0: None}
