"""MLflow away, busy, or full; threads and processes side by side; no connection before it is asked for."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from mlflow.exceptions import MlflowException

from alto_core.domain import CurveSource, JobState, TaskState
from alto_core.errors import TrackingError
from alto_core.settings import Settings
from alto_core.tracking import Tracker, connection, deliver_left_behind, sender

AWAY = MlflowException("API request to http://x failed with exception: connection refused")


@pytest.fixture
def impatient(monkeypatch: Any) -> None:
    monkeypatch.setattr(connection, "PATIENCE_SECONDS", 0.3)


def failing(
    monkeypatch: Any, tracker: Tracker, name: str, error: Exception, times: float = float("inf")
) -> list[float]:
    """Let a client method fail so many times; gives the times of the calls."""
    client, calls = tracker._connection.client, list[float]()
    working = getattr(client, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(time.monotonic())
        if len(calls) <= times:
            raise error
        return working(*args, **kwargs)

    monkeypatch.setattr(client, name, call)
    return calls


def test_a_short_absence_is_not_noticed(tracker: Tracker, open_runs: Any, make: Any, monkeypatch: Any) -> None:
    runs, (job_id,) = open_runs(1)
    calls = failing(monkeypatch, tracker, "log_batch", AWAY, times=3)
    runs.log_steps(make.steps(job_id, 1, 5))
    runs.flush()
    assert len(calls) == 4
    assert runs.read_curves()[job_id].train_steps == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("status", "passes"),
    [(400, False), (401, False), (403, False), (404, False), (408, True), (429, True), (500, True), (503, True)],
)
def test_a_server_that_refuses_an_artifact_is_not_asked_again(
    tracker: Tracker, monkeypatch: Any, status: int, passes: bool
) -> None:
    answer = requests.Response()
    answer.status_code = status
    calls = failing(monkeypatch, tracker, "log_text", requests.HTTPError("no", response=answer), times=1)
    client, place = tracker._connection.client, tracker._connection.artifact_location
    run_id = client.create_run(client.create_experiment(f"status-{status}", artifact_location=place)).info.run_id
    if passes:
        tracker._connection.call("keep a text", client.log_text, run_id, "text", "file.txt")
        assert len(calls) == 2
        return
    with pytest.raises(TrackingError, match="refused it") as told:
        tracker._connection.call("keep a text", client.log_text, run_id, "text", "file.txt")
    assert len(calls) == 1
    assert ("MLFLOW_TRACKING_USERNAME" in str(told.value)) == (status == 401)


@pytest.mark.usefixtures("impatient")
def test_nothing_is_lost_when_mlflow_stays_away_and_comes_back(
    tracker: Tracker, open_runs: Any, make: Any, monkeypatch: Any
) -> None:
    runs, ids = open_runs(3)
    failing(monkeypatch, tracker, "log_batch", AWAY)
    for job_id in ids:
        runs.log_steps(make.steps(job_id, 1, 5))
        runs.set_job_state(job_id, JobState.RUNNING)
    runs.log_evaluations([make.evaluation(job_id, 5) for job_id in ids])
    start = time.monotonic()
    with pytest.raises(TrackingError, match="gave no answer"):
        runs.flush()
    assert time.monotonic() - start < 5  # one patience, not one per run
    runs.log_steps(make.steps(ids[0], 6, 7))
    monkeypatch.undo()
    runs.flush()
    curves = runs.read_curves()
    assert [len(curves[job_id].train_steps) for job_id in ids] == [7, 5, 5]
    assert [sorted(curves[job_id].row_losses) for job_id in ids] == [[5]] * 3


def test_a_refused_write_is_told_once_and_stops_no_other(tracker: Tracker, open_runs: Any, make: Any) -> None:
    runs, ids = open_runs(2)
    tracker._connection.client.delete_run(runs.job_run_ids[ids[0]])
    for job_id in ids:
        runs.log_steps(make.steps(job_id, 1, 3))
    with pytest.raises(TrackingError, match="refused it"):
        runs.flush()
    runs.flush()
    assert runs.read_curves([ids[1]])[ids[1]].train_steps == (1, 2, 3)


def test_logging_does_not_wait_for_mlflow(tracker: Tracker, open_runs: Any, make: Any, monkeypatch: Any) -> None:
    runs, (job_id,) = open_runs(1)
    client = tracker._connection.client
    release, log_batch = threading.Event(), client.log_batch
    monkeypatch.setattr(client, "log_batch", lambda *a, **k: release.wait(30) and log_batch(*a, **k))
    start = time.monotonic()
    for step in range(1, 201):
        runs.log_steps(make.steps(job_id, step, step))
    assert time.monotonic() - start < 5
    release.set()
    runs.flush()
    assert runs.read_curves()[job_id].train_steps == tuple(range(1, 201))


def test_what_waits_is_sent_by_itself(open_runs: Any, make: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sender, "MAX_WAITING_SECONDS", 0.2)
    runs, (job_id,) = open_runs(1)
    runs.read_curves()
    runs.log_steps(make.steps(job_id, 1, 3))
    deadline = time.monotonic() + 30
    while runs.curve_source(job_id) is CurveSource.SPOOL and time.monotonic() < deadline:
        time.sleep(0.05)
    assert runs.curve_source(job_id) is CurveSource.MLFLOW
    assert runs.read_curves()[job_id].train_steps == (1, 2, 3)


def test_a_fault_in_the_thread_is_told_and_does_not_hang(
    tracker: Tracker, open_runs: Any, make: Any, monkeypatch: Any
) -> None:
    runs, (job_id,) = open_runs(1)
    failing(monkeypatch, tracker, "log_batch", ZeroDivisionError("of ours"), times=1)
    runs.log_steps(make.steps(job_id, 1, 3))
    runs.log_evaluations([make.evaluation(job_id, 4)])
    with pytest.raises(TrackingError, match="ZeroDivisionError"):
        runs.flush()
    runs.flush()
    assert list(tracker.task_runs("demo-1").read_curves()[job_id].row_losses) == []  # passed over with its batch


def test_an_idle_tracker_keeps_no_thread(open_runs: Any, make: Any) -> None:
    runs, (job_id,) = open_runs(1)
    for step in (1, 2):
        runs.log_steps(make.steps(job_id, step, step))
        runs.flush()
        deadline = time.monotonic() + 10
        while runs._outbox._sender._thread is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert runs._outbox._sender._thread is None
    assert runs.read_curves()[job_id].train_steps == (1, 2)


@pytest.mark.usefixtures("impatient")
def test_closing_while_mlflow_is_away_is_told_and_made_good_later(
    tracker: Tracker, open_runs: Any, make: Any, monkeypatch: Any
) -> None:
    runs, (job_id,) = open_runs(1)
    failing(monkeypatch, tracker, "log_batch", AWAY)
    runs.log_steps(make.steps(job_id, 1, 3))
    runs.close(TaskState.FAILED, "x")
    told = runs.release()
    assert "gave no answer" in told
    assert "alto reconcile" in told
    monkeypatch.undo()
    (left,) = deliver_left_behind(tracker._settings)
    assert left.task_id == "demo-1"
    assert deliver_left_behind(tracker._settings) == ()
    client = tracker._connection.client
    assert client.get_run(runs.parent_run_id).info.status == "FAILED"
    assert client.get_run(runs.job_run_ids[job_id]).info.status == "KILLED"
    assert runs.read_curves()[job_id].train_steps == (1, 2, 3)


def test_threads_and_coroutines_log_to_the_runs_they_name(tracker: Tracker, open_runs: Any, make: Any) -> None:
    runs, ids = open_runs(4)

    def log(job_id: str) -> None:
        for step in range(1, 21):
            runs.log_steps(make.steps(job_id, step, step, offset=ids.index(job_id)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(log, ids))

    async def evaluate() -> None:
        await asyncio.gather(*(asyncio.to_thread(runs.log_evaluations, [make.evaluation(j, 20)]) for j in ids))

    asyncio.run(evaluate())
    runs.flush()
    for i, curve in enumerate(runs.read_curves().values()):
        assert curve.train_losses == tuple(i + 2.0 / step for step in range(1, 21))
        assert curve.val_steps == (20,)
        assert list(curve.row_losses) == [20]
    client = tracker._connection.client
    assert len(client.search_runs([e.experiment_id for e in client.search_experiments()])) == 5


def test_secrets_in_the_address_stay_out_of_messages(settings: Settings, monkeypatch: Any, impatient: None) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    address = "http://anna:secret@127.0.0.1:9"
    away = Settings(home=settings.home, device=None, mlflow_tracking_uri=address, prefect_api_url=None)
    with pytest.raises(TrackingError, match="gave no answer") as caught:
        Tracker(away).task_runs("demo-1")
    assert "secret" not in str(caught.value)
    assert "127.0.0.1:9" in str(caught.value)


def test_a_file_that_is_no_database_is_told(settings: Settings) -> None:
    settings.home.mkdir(parents=True)
    (settings.home / "mlflow.db").write_bytes(b"no database" * 1000)
    with pytest.raises(TrackingError, match=r"mlflow\.db.*expected an SQLite file"):
        Tracker(settings)


def test_the_database_lets_readers_and_a_writer_work_side_by_side(tracker: Tracker, embedded: Settings) -> None:
    with closing(sqlite3.connect(embedded.home / "mlflow.db")) as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)


IMPORT = """
import sys
seen = []
def note(event, args):
    if event in ("socket.connect", "sqlite3.connect"):
        seen.append((event, args))
sys.addaudithook(note)
import alto_core.tracking
sys.exit(repr(seen) if seen else 0)
"""


def test_nothing_connects_at_import() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


WRITERS = """
import os, sys
home, folder = sys.argv[1:]
sys.path.insert(0, folder)
from conftest import make_jobs, make_steps, make_evaluation, make_task
from alto_core.settings import load_settings
from alto_core.tracking import DatasetSummary, Tracker

data = DatasetSummary(name="r", source="r", digest="d", num_train=8, num_validation=8, num_test=0, num_tokens=9)

def write(task_id):
    tracker = Tracker(load_settings({"ALTO_HOME": home}))
    runs = tracker.open_task(make_task(), task_id, make_jobs(2), data)
    for first in range(1, 21, 4):
        for job_id in runs.job_run_ids:
            runs.log_steps(make_steps(job_id, first, first + 3))
        runs.log_evaluations([make_evaluation(job_id, first + 3) for job_id in runs.job_run_ids])
        runs.flush()
        runs.read_curves()

children = []
for i in range(3):
    children.append(os.fork())  # with all that was imported
    if not children[-1]:
        write(f"demo-{i}")
        sys.exit()
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


@pytest.mark.slow
def test_three_processes_write_at_the_same_time(embedded: Settings, make: SimpleNamespace) -> None:
    """They also create their experiment, all at once."""
    command = [sys.executable, "-W", "ignore", "-c", WRITERS, str(embedded.home), str(Path(__file__).parent)]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    assert subprocess.run(command, env=environ, timeout=180, check=False).returncode == 0
    tracker = Tracker(embedded)
    runs = [tracker.task_runs(f"demo-{i}") for i in range(3)]
    assert len({of_task.experiment_id for of_task in runs}) == 1
    for of_task in runs:
        for curve in of_task.read_curves().values():
            assert curve.train_steps == tuple(range(1, 21))
            assert curve.val_steps == (4, 8, 12, 16, 20)
            assert len(curve.row_losses) == 5
