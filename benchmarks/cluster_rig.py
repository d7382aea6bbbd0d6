"""What the benchmarks of real clusters share: a quiet environment, `alto up` as a process, waiting with a limit."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from alto_core.store import QueueEvent


def quiet_environment(home: Path, *, lease_seconds: int) -> dict[str, str]:
    """Variables of a cluster that keeps everything under `home` and asks no hub."""
    return {
        "ALTO_HOME": str(home),
        "ALTO_LEASE_SECONDS": str(lease_seconds),
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }


class HostProcess:
    """An `alto up`."""

    def __init__(self, command: list[str], log: Path):
        self.log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """As if the machine had lost its power: everything at once, runs included."""
        family = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
        for member in family:
            member.kill()
        self._process.wait()

    def stop(self) -> None:
        if not self.has_ended:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(120)

    def wait(self) -> None:
        self._process.wait(120)


@contextmanager
def running_host(name: str, *, gpus: Sequence[int], ports: tuple[int, int], log: Path) -> Iterator[HostProcess]:
    """A host of the cluster, from the moment at which its GPUs are ready.

    Args:
        name: of the host.
        gpus: that the cluster may use; where there are none, they are pretended.
        ports: of MLflow and of Prefect.
        log: what it says.
    """
    command = [sys.executable, "-c", "from flows.cli.app import main; main()", "up"]
    command += ["--host", name, "--gpus", ",".join(map(str, gpus))]
    command += ["--mlflow-port", str(ports[0]), "--prefect-port", str(ports[1])]
    process = HostProcess(command, log)
    try:
        wait_until(f"host {name}", lambda: " ready" in process.log.read_text(), watched=process)
        yield process
    finally:
        process.stop()


def wait_until(
    what: str, is_so: Callable[[], bool], *, seconds: float = 600, watched: HostProcess | None = None
) -> None:
    """Ends the program where it takes longer, or the watched host ends."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if watched is not None and watched.has_ended:
            sys.exit(f"{what}: alto up ended:\n{watched.log.read_text()}")
        if time.monotonic() > deadline:
            sys.exit(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.3)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def claimed_gpus(event: QueueEvent) -> tuple[int, ...]:
    """Of an event of the kind `claimed`."""
    return tuple(map(int, event.text.split(" of ")[0].removeprefix("GPU ").split(", ")))
