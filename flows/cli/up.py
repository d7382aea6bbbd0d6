"""`alto up`: this machine as a host of the cluster, with the servers that the settings do not name elsewhere."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from alto_core import wording
from alto_core.config import NAME_PATTERN
from alto_core.device import gpus_of_this_machine
from alto_core.errors import TaskFileError
from alto_core.loading import loading
from alto_core.settings import Settings, load_settings, prepare_environment
from flows.cli.interruption import lasting_ctrl_c
from flows.cli.output import console_for
from flows.cli.queue_log import QueueLog
from flows.cli.services import Process, RunningProcess, RunningService, Service, ServiceError, start_together
from flows.cli.ui import embedded_services

LOOK_SECONDS = 0.5


def run_up(*, host: str | None, gpus: str | None, mlflow_port: int, prefect_port: int) -> None:
    """Start what is missing, join the cluster, look after this host until Ctrl-C or SIGTERM, then leave cleanly.

    Raises:
        TaskFileError: the list of GPUs is none.
        ServiceError: a port is taken, or a server or worker ends.
    """
    settings = load_settings()
    prepare_environment(settings)
    console = console_for()
    host_id = _host_name(host)
    indices, gpu_bytes = _gpus(gpus)
    is_first = settings.prefect_api_url is None
    # a host that joins a cluster finds its servers there
    services = embedded_services(settings, mlflow_port, prefect_port) if is_first else []
    with lasting_ctrl_c() as stop_if_asked, contextlib.ExitStack() as stack:
        try:
            console.print(Text(_starting(host_id, services), style="dim"))
            servers = start_together(services, stack)
            for server in servers:
                if server.name == "Prefect":
                    os.environ["PREFECT_API_URL"] = f"{server.service.url}/api"
            running: list[RunningProcess] = [*servers]
            _join(settings, host_id, indices, gpu_bytes, is_first, running, stack, console, stop_if_asked)
        except KeyboardInterrupt:
            console.print(Text("Stopping: tasks go back into the queue at their checkpoints ...", style="dim"))


def _join(
    settings: Settings,
    host_id: str,
    gpus: Sequence[int],
    gpu_bytes: int,
    is_first: bool,
    running: list[RunningProcess],
    stack: contextlib.ExitStack,
    console: Console,
    stop_if_asked: Callable[[], None],
) -> None:
    with loading():  # here, since Prefect reads the address of its server when it is imported
        from flows.deployments import CONTROL_POOL, deploy_control, deploy_host, pool_name
        from flows.host import HostAgent
        from flows.reconcile import sweep

    sweep()  # what died while nobody looked; it warns of it
    deploy_host(host_id)
    pools = [pool_name(host_id)]
    if is_first:
        deploy_control()
        pools.append(CONTROL_POOL)
    for pool in pools:
        worker = RunningProcess(worker_process(settings, pool))
        stack.callback(worker.stop)
        running.append(worker)
    agent = HostAgent(settings, host_id=host_id, gpus=gpus, gpu_bytes=gpu_bytes)
    agent.join()
    log = QueueLog(settings, host_id)
    stack.enter_context(agent.watching())
    stack.callback(agent.leave)  # before the workers end, which would kill their runs
    for line in _greeting(settings, host_id, len(gpus), running):
        console.print(line, markup=False, soft_wrap=True)
    while True:
        stop_if_asked()
        for process in running:
            if process.has_ended:
                raise ServiceError(f"{process.name} has ended. Its log is {process.log_file}.")
        agent.plan()
        for line in log.new_lines():
            console.print(Text(line, style="dim"), soft_wrap=True)
        time.sleep(LOOK_SECONDS)


def _starting(host_id: str, services: Sequence[Service]) -> str:
    if not services:
        return f"Starting {host_id} ..."
    names = " and ".join(service.name for service in services)
    return f"Starting {names}; the first time they make their databases, which takes up to a minute ..."


def _greeting(settings: Settings, host_id: str, num_gpus: int, running: Sequence[RunningProcess]) -> list[str]:
    """Where everything is, and what to do next."""
    urls = {process.name: process.service.url for process in running if isinstance(process, RunningService)}
    urls.setdefault("Prefect", os.environ["PREFECT_API_URL"].removesuffix("/api"))
    addresses = "   ".join(f"{name} {url}" for name, url in urls.items())
    return [
        f"{host_id}: {wording.plural(num_gpus, 'GPU')} ready   {addresses}",
        f"`alto submit FILE` adds a task, in this folder or with ALTO_HOME={settings.home}. Ctrl-C stops this host.",
    ]


def worker_process(settings: Settings, pool: str) -> Process:
    """A Prefect worker for a pool. It starts runs in folders of their own, so it is told the home as a whole path."""
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--name", pool]
    return Process(
        name=f"worker {pool}",
        command=command,
        log_file=settings.home / "logs" / f"{pool}.log",
        environment={
            "ALTO_HOME": str(settings.home),
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PYTHONUNBUFFERED": "1",
        },
    )


def _host_name(wanted: str | None) -> str:
    """Names a work pool and a log file too."""
    name = wanted or socket.gethostname().split(".")[0]
    if not re.fullmatch(NAME_PATTERN, name):
        raise TaskFileError("--host", got=repr(name), expected="1 to 64 letters, digits, '.', '_' or '-'")
    return name


def _gpus(wanted: str | None) -> tuple[tuple[int, ...], int]:
    """Indices and memory of the GPUs to use: those asked for, or all of this machine."""
    here, gpu_bytes = gpus_of_this_machine()
    if wanted is None:
        if not here:
            raise TaskFileError(
                "--gpus", got="no GPU on this machine", expected="indices, for example --gpus 0,1 to pretend two"
            )
        return here, gpu_bytes
    parts = wanted.split(",")
    if not all(part.isdecimal() for part in parts) or len(set(parts)) != len(parts):
        raise TaskFileError("--gpus", got=repr(wanted), expected="different indices, for example 0,1")
    return tuple(map(int, parts)), gpu_bytes
