"""`alto ui`: MLflow's and Prefect's own UIs over the embedded databases, on loopback, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
import time

from rich.console import Console
from rich.text import Text

from alto_core.redaction import without_secrets
from alto_core.settings import Settings, load_settings, prepare_environment
from alto_core.store import Store, TaskRecord
from flows.cli.interruption import sigterm_as_ctrl_c
from flows.cli.output import console_for
from flows.cli.services import LOOPBACK, RunningService, Service, ServiceError, start_together


def run_ui(*, mlflow_port: int, prefect_port: int) -> None:
    """Start what the settings do not name as a server elsewhere, print where everything is, and wait.

    Raises:
        ServiceError: a port is taken, or a server ends before or while it should serve.
    """
    settings = load_settings()
    prepare_environment(settings)
    console = console_for()
    services = embedded_services(settings, mlflow_port, prefect_port)
    with sigterm_as_ctrl_c(), contextlib.ExitStack() as stack:
        try:
            console.print(Text(f"Starting {' and '.join(s.name for s in services) or 'nothing'} ...", style="dim"))
            running = start_together(services, stack)
            # a database's address may hold a password, a server's does not
            mlflow_url = _base_url(services, "MLflow") or without_secrets(settings.mlflow_tracking_uri)
            prefect_url = _base_url(services, "Prefect") or (settings.prefect_api_url or "").removesuffix("/api")
            _print_links(settings, mlflow_url, prefect_url, console)
            if not running:
                return
            console.print(Text("Ctrl-C stops both.", style="dim"))
            _wait(running)
        except KeyboardInterrupt:
            console.print(Text("Stopping ...", style="dim"))


def embedded_services(settings: Settings, mlflow_port: int, prefect_port: int) -> list[Service]:
    """MLflow's and Prefect's servers, each unless the settings name one elsewhere."""
    services = []
    logs = settings.home / "logs"
    if settings.has_embedded_mlflow:
        _use_wal(settings.mlflow_tracking_uri)
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", settings.mlflow_tracking_uri]
        command += ["--artifacts-destination", str(settings.artifacts), "--host", LOOPBACK, "--port", str(mlflow_port)]
        command += ["--workers", "1", "--uvicorn-opts", "--no-access-log"]
        services.append(
            Service(
                name="MLflow",
                command=command,
                port=mlflow_port,
                health_path="/health",
                log_file=logs / "mlflow.log",
                environment={},
            )
        )
    if settings.prefect_api_url is None:
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", LOOPBACK, "--port", str(prefect_port)]
        services.append(
            Service(
                name="Prefect",
                command=command,
                port=prefect_port,
                health_path="/api/health",
                log_file=logs / "prefect.log",
                environment={
                    # the page would ask on Prefect's default port, whatever port the server has
                    "PREFECT_SERVER_UI_API_URL": f"http://{LOOPBACK}:{prefect_port}/api",
                },
            )
        )
    return services


def _base_url(services: list[Service], name: str) -> str | None:
    return next((service.url for service in services if service.name == name), None)


def _use_wal(uri: str) -> None:
    """With the write-ahead log the UI can read while a task writes; the mode stays with the file."""
    with contextlib.closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as connection:
        connection.execute("pragma journal_mode=WAL")


def _print_links(settings: Settings, mlflow_url: str, prefect_url: str, console: Console) -> None:
    links = [("MLflow", mlflow_url), ("Prefect", prefect_url)]
    latest = Store(settings).tasks(limit=1)
    if latest:
        links += _task_links(settings, latest[0], mlflow_url, prefect_url)
    width = max(len(name) for name, _ in links)
    for name, url in links:
        console.print(Text.assemble((f"{name:<{width}}  ", "dim"), url), soft_wrap=True)


def _task_links(settings: Settings, record: TaskRecord, mlflow_url: str, prefect_url: str) -> list[tuple[str, str]]:
    found = []
    if record.parent_run_id:
        from alto_core.tracking import Tracker, links

        runs = Tracker(settings).task_runs(record.task_id)
        run_ids = list(runs.job_run_ids.values())
        found.append((record.task_id, links.run_url(mlflow_url, runs.experiment_id, runs.parent_run_id)))
        found.append(("its jobs compared", links.compare_url(mlflow_url, runs.experiment_id, run_ids)))
    if record.registered_name:
        from alto_core.tracking import links

        found.append(("its registered model", links.model_url(mlflow_url, record.registered_name)))
    if record.flow_run_id:
        found.append(("its flow run", f"{prefect_url}/runs/flow-run/{record.flow_run_id}"))
    return found


def _wait(running: list[RunningService]) -> None:
    while True:
        for started in running:
            if started.has_ended:
                raise ServiceError(f"{started.name} has ended. Its log is {started.log_file}.")
        time.sleep(0.5)
