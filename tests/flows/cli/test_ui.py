"""Server processes that are started, waited for and stopped with their children; the real UIs once."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from alto_core.settings import Settings
from alto_core.store import Store
from alto_core.tracking.links import compare_url, model_url
from flows.cli import services, ui
from flows.cli.services import RunningService, Service, ServiceError, answers

REPOSITORY = Path(__file__).resolve().parents[3]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _service(tmp_path: Path, command: list[str], port: int) -> Service:
    return Service(
        name="MLflow", command=command, port=port, health_path="/", log_file=tmp_path / "a" / "log", environment={}
    )


def test_a_service_is_waited_for_and_stopped_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "STOP_SECONDS", 1.0)
    port = _free_port()
    # the server is a child of the process that was started, and that one ignores SIGTERM
    script = f"trap '' TERM; {sys.executable} -m http.server {port} --bind 127.0.0.1 & wait; sleep 60"
    service = _service(tmp_path, ["sh", "-c", script], port)
    running = RunningService(service)
    try:
        running.wait_until_up(30)
        assert answers(service.url + "/")
        family = psutil.Process(running._process.pid).children(recursive=True)
        assert family
    finally:
        running.stop()
    assert running.has_ended
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)
    assert not answers(service.url + "/")


def test_a_taken_port_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ServiceError, match=rf"port {port} for MLflow .*maybe `alto up` or `alto ui`.*--mlflow-port"
        ):
            RunningService(_service(tmp_path, ["true"], port))
    assert not (tmp_path / "a").exists()


def test_a_server_that_ends_at_once_shows_its_log(tmp_path: Path) -> None:
    service = _service(tmp_path, ["sh", "-c", "echo no such table; exit 3"], _free_port())
    running = RunningService(service)
    with pytest.raises(ServiceError, match=r"ended with code 3[\s\S]*no such table"):
        running.wait_until_up(30)
    running.stop()


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    running = RunningService(_service(tmp_path, ["sleep", "60"], _free_port()))
    with pytest.raises(ServiceError, match="gave no answer"):
        running.wait_until_up(0.5)
    running.stop()
    assert running.has_ended


def test_the_comparison_page_lists_all_runs() -> None:
    url = compare_url("http://127.0.0.1:5000", "7", ["a", "b"])
    address, _, side = url.rpartition("&")
    assert address == "http://127.0.0.1:5000/#/compare-runs?runs=%5B%22a%22%2C%22b%22%5D&experiments=%5B%227%22%5D"
    assert side == "workflowType=machine_learning"


def test_links_lead_to_the_latest_task_in_both_uis(settings: Settings, finished_task: str) -> None:
    Store(settings).set_task_fields(finished_task, registered_name="made", flow_run_id="8f14")
    shown = io.StringIO()
    ui._print_links(settings, "http://127.0.0.1:5000", "http://127.0.0.1:4200", Console(file=shown, width=120))
    assert [line.split()[-1] for line in shown.getvalue().splitlines()] == [
        "http://127.0.0.1:5000",
        "http://127.0.0.1:4200",
        model_url("http://127.0.0.1:5000", "made"),
        "http://127.0.0.1:4200/runs/flow-run/8f14",
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_uis_serve_until_they_are_told_to_stop(
    empty_database: Path, empty_prefect_database: Path, tmp_path: Path
) -> None:
    (tmp_path / "alto" / "prefect").mkdir(parents=True)
    shutil.copy(empty_database, tmp_path / "alto" / "mlflow.db")
    shutil.copy(empty_prefect_database, tmp_path / "alto" / "prefect" / "prefect.db")
    mlflow_port, prefect_port = _free_port(), _free_port()
    environment = {
        **os.environ,
        "ALTO_HOME": str(tmp_path / "alto"),
        "PREFECT_HOME": str(tmp_path / "alto" / "prefect"),
        "PYTHONPATH": str(REPOSITORY),
        "COLUMNS": "200",
    }
    for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
        environment.pop(name, None)
    command = [sys.executable, "-c", "from flows.cli.app import main; main()", "ui"]
    command += ["--mlflow-port", str(mlflow_port), "--prefect-port", str(prefect_port)]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        output = ""
        for line in process.stdout:
            output += line
            if "Ctrl-C" in line:
                break
        urls = re.findall(r"http://127\.0\.0\.1:\d+", output)
        assert urls[:2] == [f"http://127.0.0.1:{mlflow_port}", f"http://127.0.0.1:{prefect_port}"]
        for url in urls[:2]:
            with urllib.request.urlopen(url, timeout=10) as response:
                assert b"<html" in response.read().lower()
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2
        listening = [
            place.laddr.ip
            for one in family
            for place in one.net_connections("tcp")
            if place.status == psutil.CONN_LISTEN
        ]
        assert len(listening) >= 2
        assert set(listening) == {"127.0.0.1"}
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
        process.stdout.close()
    assert code == 0
    deadline = time.monotonic() + 10
    while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family):
        assert time.monotonic() < deadline, family
        time.sleep(0.1)
