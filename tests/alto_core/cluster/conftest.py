"""A store with two hosts of two GPUs and tasks that nobody has to train."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from alto_core.config import parse_task
from alto_core.domain import JobBudget, LoraJob
from alto_core.settings import Settings
from alto_core.store import Demand, Fleet, Queue, Store

BUDGET = JobBudget(total_steps=40, warmup_steps=4, eval_steps=(4, 40))
Submit = Callable[..., LoraJob]


def task_content(owner: str = "me") -> dict[str, Any]:
    return {
        "name": "demo",
        "owner": owner,
        "model": {"name": "org/tiny"},
        "data": {"source": "rows.jsonl"},
        "search_space": {"learning_rate": 1e-3, "lora_rank": 8},
        "budget": {"steps": 40},
    }


def make_job() -> LoraJob:
    return LoraJob(learning_rate=1e-3, lora_rank=8, lora_alpha=16.0, adapter_batch_size=4, target_modules=("q_proj",))


@pytest.fixture
def queue(settings: Settings) -> Iterator[Queue]:
    for host_id in ("left", "right"):
        Fleet(settings).join(host_id, gpus=(0, 1), gpu_bytes=10, work_pool=f"alto-{host_id}")
    queue = Queue(settings)
    yield queue
    queue.close()


@pytest.fixture
def submit(settings: Settings, queue: Queue) -> Submit:
    """Records a task of one job and puts it into the queue."""

    def add(task_id: str, **demand: Any) -> LoraJob:
        content, job = task_content(owner=demand.pop("owner", "me")), make_job()
        store = Store(settings)
        store.add_task(task_id, parse_task(content), (job,), {job.job_id: BUDGET})
        store.close()
        queue.submit(task_id, Demand(**{"num_gpus": 1, "expected_seconds": 60.0} | demand))
        return job

    return add


@pytest.fixture
def start_process() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts Python with a program and arguments; whatever is left of it is killed in the end."""
    started: list[subprocess.Popen[str]] = []

    def start(program: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        import os

        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_until(is_so: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)
