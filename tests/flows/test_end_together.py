"""What a command has started for itself ends with it, also where it is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 60
SLEEPER = """
import subprocess, time
from flows.end_together import end_with_this_process
child = subprocess.Popen(["sleep", "600"])
end_with_this_process(child.pid)
print(child.pid, flush=True)
time.sleep(600)
"""
SERVICE = """
import time
from pathlib import Path
from flows.cli.services import Process, RunningProcess
started = RunningProcess(Process(name="it", command=["sleep", "600"], log_file=Path("/dev/null"), environment={}))
print(started._process.pid, flush=True)
time.sleep(600)
"""
SERVER = """
import time
from alto_core.settings import load_settings, prepare_environment
prepare_environment(load_settings())
from flows.embedded_server import start_embedded_server
from prefect.server.api.server import SubprocessASGIServer
start_embedded_server()
start_embedded_server()
print(SubprocessASGIServer().server_process.pid, flush=True)
time.sleep(600)
"""


def _child_of_a_killed(code: str, environment: dict[str, str], *, from_terminal: bool) -> psutil.Process:
    """The process whose id the code prints, after the code's own process was killed."""
    command = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, text=True, start_new_session=True
    )
    assert command.stdout is not None
    with command.stdout:  # the child holds its other end
        child = psutil.Process(int(command.stdout.readline()))
    assert child.is_running()
    if from_terminal:  # by Ctrl-C, or by being closed, it tells all; who waits for the end must not end by it
        for other in psutil.Process(command.pid).children():
            if other.pid != child.pid:
                other.send_signal(signal.SIGINT)
                other.send_signal(signal.SIGHUP)
    command.kill()
    command.wait()
    return child


def _has_ended(process: psutil.Process) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            process.kill()
            return False
        time.sleep(0.1)
    return True


@pytest.mark.parametrize("code", [SLEEPER, SERVICE], ids=["child", "service"])
def test_a_child_ends_when_its_parent_is_killed(code: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    assert _has_ended(_child_of_a_killed(code, environment, from_terminal=True))


def test_a_child_may_be_let_live_after_all() -> None:
    code = SLEEPER.replace("end_with_this_process(child.pid)", "end_with_this_process(child.pid)()")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    child = _child_of_a_killed(code, environment, from_terminal=False)
    time.sleep(1)  # for a shell that waited nevertheless
    assert child.is_running()
    child.kill()


@pytest.mark.slow
def test_a_killed_command_leaves_no_prefect_server_behind(empty_prefect_database: Path, tmp_path: Path) -> None:
    (tmp_path / "home" / "prefect").mkdir(parents=True)
    shutil.copy(empty_prefect_database, tmp_path / "home" / "prefect" / "prefect.db")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"ALTO_HOME": str(tmp_path / "home"), "PYTHONPATH": str(REPOSITORY)}
    assert _has_ended(_child_of_a_killed(SERVER, environment, from_terminal=False))
