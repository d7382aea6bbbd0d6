"""`alto up`: what a host and its workers are told, and how it is stopped. Real hosts: `benchmarks/cluster_run.py`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from alto_core.config import TuningTask
from alto_core.queue_states import StopRequest
from alto_core.settings import Settings, load_settings
from alto_core.store import Demand, Fleet, Queue, Store
from flows.cli.interruption import lasting_ctrl_c
from flows.cli.queue_log import QueueLog
from flows.cli.up import worker_process


def test_a_host_tells_what_happens_on_it_and_nothing_twice(settings: Settings, task: TuningTask) -> None:
    fleet, queue, store = Fleet(settings), Queue(settings), Store(settings)
    for host in ("left", "right"):
        fleet.join(host, gpus=(0, 1), gpu_bytes=0, work_pool=f"alto-{host}")
    log = QueueLog(settings, "left")
    for task_id, host in (("made-1", "left"), ("made-2", "right")):
        store.add_task(task_id, task)
        queue.submit(task_id, Demand(num_gpus=1, expected_seconds=60.0))
        queue.claim(task_id, host, [1])
    assert [line.split("UTC  ")[1] for line in log.new_lines()] == [
        "made-1: submitted, 1 GPU, normal",
        "made-1: claimed, GPU 1 of left, attempt 1",
        "made-2: submitted, 1 GPU, normal",
    ]
    queue.request_stop("made-1", StopRequest.PAUSE)
    assert [line.split("UTC  ")[1] for line in log.new_lines()] == [
        "made-1: asked to pause, claimed",
        "made-1: released, paused: asked to pause before its run began",
    ]
    assert list(log.new_lines()) == []


def test_workers_are_told_the_home_as_a_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # They start runs in folders of their own, where a relative path would lead elsewhere.
    monkeypatch.chdir(tmp_path)
    settings = load_settings({"ALTO_HOME": ".alto"})
    assert worker_process(settings, "alto-tried").environment["ALTO_HOME"] == str(tmp_path / ".alto")


def test_an_interruption_that_a_finalizer_swallowed_is_not_lost() -> None:
    class Interrupted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monitored: list[object] = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda caught: monitored.append(caught.exc_type)
    try:
        with lasting_ctrl_c() as stop_if_asked:
            stop_if_asked()
            Interrupted()
            assert monitored == [KeyboardInterrupt]
            with pytest.raises(KeyboardInterrupt):
                stop_if_asked()
    finally:
        sys.unraisablehook = hook
    assert signal.getsignal(signal.SIGTERM) is before
