"""P3: the Prefect server is away for a while under a running task; the run goes on and ends Completed, once."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from alto_core.config import TuningTask
from alto_core.domain import TaskState
from alto_core.settings import load_settings
from alto_core.store import Store
from flows.cli.services import RunningService, Service

AWAY_SECONDS = 5.0


def flow_runs(port: int) -> list[dict[str, Any]]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/flow_runs/filter", data=b"{}", headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        runs: list[dict[str, Any]] = json.load(answer)
    return runs


@contextmanager
def running(service: Service) -> Iterator[None]:
    server = RunningService(service)
    try:
        server.wait_until_up()
        yield
    finally:
        server.stop()


@pytest.mark.slow
def test_training_goes_on_and_the_run_ends_completed(
    tiny_task: Callable[..., TuningTask],
    workspace_home: Path,
    empty_database: Path,
    empty_prefect_database: Path,
    tmp_path: Path,
) -> None:
    shutil.copy(empty_database, workspace_home / "mlflow.db")
    (tmp_path / "prefect").mkdir()
    shutil.copy(empty_prefect_database, tmp_path / "prefect" / "prefect.db")
    space = {"learning_rate": [1e-3, 2e-3], "lora_rank": 4, "adapter_batch_size": 4}
    task = tiny_task(
        search_space=space, budget={"steps": 800, "eval_interval_fraction": 0.05, "gate_warmup_fraction": 0.5}
    )
    file = tmp_path / "task.yaml"
    file.write_text(yaml.safe_dump(task.model_dump(mode="json", exclude_none=True)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Service(
        name="Prefect",
        command=[sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
        port=port,
        health_path="/api/health",
        log_file=tmp_path / "server.log",
        environment={"PREFECT_HOME": str(tmp_path / "prefect")},
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
    command = [sys.executable, "-c", "from flows.cli.app import main; main()", "tune", str(file), "--plain"]
    store = Store(load_settings())

    def steps() -> int:
        return sum(record.step for one in store.tasks() for record in store.jobs(one.task_id))

    with running(server):
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        while not steps():
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
    before = steps()
    time.sleep(AWAY_SECONDS)
    assert steps() > before, "it trained while the server was away"
    with running(server):
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        assert [run["state_type"] for run in flow_runs(port)] == ["COMPLETED"]
    (record,) = store.tasks()
    assert record.state is TaskState.FINISHED
