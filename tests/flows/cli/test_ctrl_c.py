"""Ctrl-C in a terminal: it reaches every process of the command at once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from alto_core.config import TuningTask
from alto_core.domain import JobState, TaskState
from alto_core.settings import load_settings
from alto_core.store import Store

COMMAND = "from flows.cli.app import main; main()"


@pytest.mark.slow
def test_it_ends_a_tuning_command_quietly(
    tiny_task: Callable[..., TuningTask],
    workspace_home: Path,
    empty_database: Path,
    empty_prefect_database: Path,
    tmp_path: Path,
) -> None:
    """With the Prefect server that the command has started for itself."""
    file = tmp_path / "task.yaml"
    task = tiny_task(budget={"steps": 100_000, "eval_interval_fraction": 0.0001, "gate_warmup_fraction": 0.5})
    shutil.copy(empty_database, workspace_home / "mlflow.db")
    (workspace_home / "prefect").mkdir()
    shutil.copy(empty_prefect_database, workspace_home / "prefect" / "prefect.db")
    file.write_text(yaml.safe_dump(task.model_dump(mode="json", exclude_none=True)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "tune", str(file), "--plain"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # what started us may ignore it
    )
    store = Store(load_settings())
    try:
        while not any(record.step for one in store.tasks() for record in store.jobs(one.task_id)):
            assert process.poll() is None, process.communicate()
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, errors
    for noise in ("Traceback", "Error logging", "ERROR", "Crash"):
        assert noise not in errors, errors
    (record,) = store.tasks()
    assert record.state is TaskState.CANCELLED and "cancelled" in output
    assert {job.state for job in store.jobs(record.task_id)} <= {JobState.CANCELLED, JobState.DIVERGING}
