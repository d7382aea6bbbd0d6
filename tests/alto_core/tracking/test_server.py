"""The same against a real MLflow server on loopback."""

from __future__ import annotations

import math
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alto_core.domain import JobState, TaskState
from alto_core.settings import Settings, load_settings
from alto_core.tracking import ServingFacts, Tracker, history

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(empty_database, folder / "mlflow.db")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}", "--workers", "1"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    environ = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ, start_new_session=True)
    try:
        wait_for(port, process, folder / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 15)
        process.wait(30)


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError(f"no server within two minutes: {log.read_text()}")


@pytest.fixture
def remote(server: str, tmp_path: Path) -> Settings:
    return load_settings({"ALTO_HOME": str(tmp_path / "alto"), "MLFLOW_TRACKING_URI": server})


def test_a_task_is_logged_read_and_registered_through_a_server(
    remote: Settings, make: SimpleNamespace, tmp_path: Path
) -> None:
    tracker = Tracker(remote)
    runs = tracker.open_task(make.task(), "demo-1", make.jobs(3), make.data)
    ids = list(runs.job_run_ids)
    assert tracker.open_task(make.task(), "demo-1", make.jobs(3), make.data).job_run_ids == runs.job_run_ids
    for i, job_id in enumerate(ids):
        steps = [replace(r, train_loss=math.nan) if r.step == 7 else r for r in make.steps(job_id, 1, 20 + 10 * i)]
        runs.log_steps(steps)
        runs.log_evaluations([make.evaluation(job_id, 10), make.evaluation(job_id, 20, (math.inf, 1.0))])
    runs.set_job_state(ids[0], JobState.UNDERPERFORMING, reason="ranked last", gate_rank=3)
    runs.flush()
    for reader in (runs, tracker.task_runs("demo-1")):
        curves = reader.read_curves()
        for i, job_id in enumerate(ids):
            curve = curves[job_id]
            assert curve.train_steps == tuple(range(1, 21 + 10 * i))
            assert math.isnan(curve.train_losses[6])
            assert curve.train_losses[7] == 2.0 / 8
            assert curve.val_losses[1] == math.inf
            assert curve.row_losses[10] == make.evaluation(job_id, 10).row_losses
    assert curves[ids[0]].ended is JobState.UNDERPERFORMING
    runs.log_steps(make.steps(ids[2], 41, 42))
    runs.flush()
    assert runs.read_curves()[ids[2]].last_step == 42

    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"\1" * 1000)
    assert runs.log_adapter(ids[1], folder).startswith("runs:/")
    facts = ServingFacts(
        base_model="org/tiny",
        base_revision=None,
        base_fingerprint=None,
        stop_token_ids=(2,),
        pad_token_id=0,
        max_new_tokens=9,
        example_prompt="a",
    )
    version = runs.register(name="through-a-server", job_id=ids[1], adapter_folder=folder, tags={}, facts=facts)
    assert version.aliases == ("champion",)
    copy = tracker.registry.download(version, tmp_path / "copy")
    assert (copy / "adapter_model.safetensors").read_bytes() == b"\1" * 1000
    runs.close(TaskState.FINISHED)
    assert runs.release() == ""
    client = tracker._connection.client
    assert [client.get_run(r).info.status for r in runs.job_run_ids.values()] == ["KILLED", "KILLED", "KILLED"]


def test_long_histories_come_whole_where_the_server_would_leave_points_out(
    remote: Settings, make: SimpleNamespace, monkeypatch: Any
) -> None:
    monkeypatch.setattr(history, "MAX_POINTS_PER_RUN", 40)
    monkeypatch.setattr(history, "STEPS_PER_WINDOW", 30)
    tracker = Tracker(remote)
    runs = tracker.open_task(make.task(name="long"), "long-1", make.jobs(2), make.data)
    first, second = runs.job_run_ids
    runs.log_steps(make.steps(first, 1, 100))
    runs.log_steps(make.steps(second, 1, 10))
    runs.flush()
    curves = runs.read_curves()
    assert curves[first].train_steps == tuple(range(1, 101))
    assert curves[second].train_steps == tuple(range(1, 11))


def test_a_server_without_the_bulk_call_is_read_run_by_run(
    remote: Settings, make: SimpleNamespace, monkeypatch: Any
) -> None:
    monkeypatch.setattr(history, "BULK_PATH", "/ajax-api/2.0/mlflow/metrics/no-such-call")
    tracker = Tracker(remote)
    runs = tracker.open_task(make.task(name="old"), "old-1", make.jobs(2), make.data)
    first, second = runs.job_run_ids
    runs.log_steps(make.steps(first, 1, 5))
    runs.flush()
    assert runs.read_curves()[first].train_steps == (1, 2, 3, 4, 5)
    assert runs.read_curves()[second].train_steps == ()
