"""Server processes on this machine: start them, wait until they answer, stop them with all their children."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from alto_core.errors import AltoError
from flows.end_together import end_with_this_process

LOOPBACK = "127.0.0.1"
STOP_SECONDS = 10.0
START_SECONDS = 180.0
"""A first start migrates the database, which takes up to a minute on a slow machine."""


class ServiceError(AltoError):
    """A server could not be started here: its port is taken, or it ended before it answered."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process to start and to stop."""

    name: str
    command: Sequence[str]
    log_file: Path
    environment: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Service(Process):
    """A server to start."""

    port: int
    health_path: str
    """Answers 200 when the server is up."""

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"


class RunningProcess:
    """A started process, in a group of its own, so that stopping reaches its children. It never outlives this one."""

    def __init__(self, process: Process):
        self.name, self.log_file = process.name, process.log_file
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                process.command,
                env={**os.environ, **process.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._no_longer_end_together = end_with_this_process(self._process.pid)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        """Ask the whole group to end, and kill what is left after a while, groups that it made itself included."""
        family = self._family()
        try:
            self._stop_group()
        finally:
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            self._no_longer_end_together()  # the id may be another's by then

    def _family(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def _stop_group(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            if self._group_is_gone(STOP_SECONDS):
                return

    def _group_is_gone(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._process.poll()
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.05)
        return False

    def _log_tail(self) -> str:
        text = self.log_file.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-15:])


class RunningService(RunningProcess):
    """A started server."""

    def __init__(self, service: Service):
        require_free_port(service.name, service.port)
        super().__init__(service)
        self.service = service

    def wait_until_up(self, seconds: float = START_SECONDS) -> None:
        """Return when the server answers.

        Raises:
            ServiceError: it ended, or does not answer in time; the text shows the end of its log.
        """
        deadline = time.monotonic() + seconds
        while not answers(self.service.url + self.service.health_path):
            if self.has_ended or time.monotonic() > deadline:
                what = (
                    f"ended with code {self._process.returncode}"
                    if self.has_ended
                    else f"gave no answer in {seconds:.0f} s"
                )
                raise ServiceError(f"{self.name} {what}. The end of {self.log_file}:\n{self._log_tail()}")
            time.sleep(0.2)


def start_together(services: Sequence[Service], stack: contextlib.ExitStack) -> list[RunningService]:
    """Start servers side by side and return when all of them answer; the stack stops them when it is closed.

    Raises:
        ServiceError: a port is taken, or one of them ended or does not answer in time.
    """
    running: list[RunningService] = []
    for service in services:
        started = RunningService(service)
        stack.callback(started.stop)
        running.append(started)
    for started in running:
        started.wait_until_up()
    return running


def require_free_port(name: str, port: int) -> None:
    """Raise `ServiceError` when something already listens there."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise ServiceError(
                f"port {port} for {name} cannot be used: got {error.strerror}, expected a free port on {LOOPBACK}. "
                f"Stop what listens there, maybe `alto up` or `alto ui`, or choose another with --{name.lower()}-port."
            ) from None


def answers(url: str, timeout_seconds: float = 2.0) -> bool:
    """Whether a GET of the URL returns 200."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_seconds) as response:  # noqa: S310 - http(s) URLs of settings
            return response.status == 200
    except (urllib.error.URLError, OSError, ValueError):
        return False
