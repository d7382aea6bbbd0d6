"""The queue and the hosts, on SQLite and on PostgreSQL: no task and no GPU is ever given away twice."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from alto_core.config import TuningTask, parse_task
from alto_core.domain import TaskState
from alto_core.errors import StoreError
from alto_core.queue_states import Priority, QueueState, StopRequest
from alto_core.settings import Settings
from alto_core.store import Demand, Fleet, KeptPlacement, KeptPlan, Queue, Store
from tests.conftest import NO_PROCESS


def _postgres() -> ModuleType:
    spec = importlib.util.spec_from_file_location("postgres", Path(__file__).resolve().parents[1] / "postgres.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def postgres_template() -> Iterator[str]:
    with _postgres().postgres_server() as template:
        yield template


@pytest.fixture(params=["sqlite", "postgresql"])
def cluster(request: pytest.FixtureRequest, settings: Settings) -> Settings:
    """Settings whose store has one task, `demo-1`, and two hosts of two GPUs."""
    if request.param == "postgresql":
        template = request.getfixturevalue("postgres_template")
        settings = replace(settings, store_address=_postgres().make_database(template, "alto"))
    for host_id in ("left", "right"):
        Fleet(settings).join(host_id, gpus=(0, 1), gpu_bytes=10, work_pool=f"alto-{host_id}")
    submit(settings, "demo-1")
    return settings


def make_task(**sections: Any) -> TuningTask:
    content = {
        "name": "demo",
        "model": {"name": "org/tiny"},
        "data": {"source": "rows.jsonl"},
        "search_space": {"learning_rate": 1e-3, "lora_rank": 8},
        "budget": {"steps": 3},
    }
    return parse_task(content | sections)


def submit(settings: Settings, task_id: str, **demand: Any) -> None:
    store = Store(settings)
    store.add_task(task_id, make_task(owner=demand.pop("owner", "me")))
    Queue(settings).submit(task_id, Demand(**{"num_gpus": 1, "expected_seconds": 60.0} | demand))
    store.close()


def holders(settings: Settings) -> dict[str, dict[int, str | None]]:
    return {host.host_id: dict(host.holders) for host in Fleet(settings).hosts()}


FREE = {"left": {0: None, 1: None}, "right": {0: None, 1: None}}


def test_an_entry_comes_back_as_it_was_submitted(cluster: Settings) -> None:
    deadline = datetime.now(UTC) + timedelta(hours=3)
    demand = Demand(
        num_gpus=2, expected_seconds=12.5, priority=Priority.URGENT, deadline=deadline, min_gpu_bytes=141 * 2**30
    )
    store = Store(cluster)
    store.add_task("other-1", make_task(owner="ann"))
    Queue(cluster).submit("other-1", demand)
    entry = Queue(cluster).entry("other-1")
    assert (entry.demand, entry.owner, entry.state, entry.attempt) == (demand, "ann", QueueState.WAITING, 0)
    assert (entry.gpus, entry.host_id, entry.stop) == ((), None, None)
    assert [e.task_id for e in Queue(cluster).entries()] == ["demo-1", "other-1"]


def test_a_task_is_submitted_once_and_only_before_it_runs(cluster: Settings) -> None:
    with pytest.raises(StoreError, match="once"):
        Queue(cluster).submit("demo-1", Demand(num_gpus=1, expected_seconds=1.0))
    store = Store(cluster)
    store.add_task("ran-1", make_task())
    store.end_task("ran-1", TaskState.FINISHED)
    with pytest.raises(StoreError, match="got a finished task"):
        Queue(cluster).submit("ran-1", Demand(num_gpus=1, expected_seconds=1.0))
    with pytest.raises(StoreError, match="unknown id"):
        Queue(cluster).entry("nobody-1")
    with pytest.raises(StoreError, match=r"never submitted.*`alto tune` or `alto resume`, is ended there by Ctrl-C"):
        Queue(cluster).request_stop("ran-1", StopRequest.CANCEL)


def test_a_run_goes_through_claim_begin_and_release(cluster: Settings) -> None:
    queue = Queue(cluster)
    attempt = queue.claim("demo-1", "left", [1])
    assert attempt == 1
    assert holders(cluster)["left"] == {0: None, 1: "demo-1"}
    queue.note_flow_run("demo-1", attempt, "flow-run")
    entry = queue.begin("demo-1", attempt, NO_PROCESS)
    assert (entry.state, entry.gpus, entry.host_id, entry.process_id) == (QueueState.RUNNING, (1,), "left", NO_PROCESS)
    queue.beat("demo-1", attempt)
    assert queue.entry("demo-1").flow_run_id == "flow-run"
    assert queue.release("demo-1", attempt, QueueState.ENDED, "done")
    assert not queue.release("demo-1", attempt, QueueState.WAITING, "again")
    assert queue.entry("demo-1").state is QueueState.ENDED
    assert holders(cluster) == FREE
    assert [event.kind for event in queue.events(task_id="demo-1")] == ["submitted", "claimed", "begun", "released"]


@pytest.mark.parametrize("gpus", [[0, 1], [0, 0], [7], []])
def test_gpus_that_are_held_gone_or_too_many_are_not_claimed(cluster: Settings, gpus: list[int]) -> None:
    submit(cluster, "other-1")
    queue = Queue(cluster)
    assert queue.claim("other-1", "left", [0]) == 1
    assert queue.claim("demo-1", "left", gpus) is None
    assert queue.claim("demo-1", "nowhere", [0]) is None
    assert queue.entry("demo-1").state is QueueState.WAITING
    assert holders(cluster)["left"] == {0: "other-1", 1: None}


def test_a_claim_is_begun_once_and_not_after_it_was_given_up(cluster: Settings) -> None:
    queue = Queue(cluster)
    first = queue.claim("demo-1", "left", [0])
    assert first is not None
    queue.begin("demo-1", first, NO_PROCESS)
    with pytest.raises(StoreError, match="A task runs once at a time"):
        queue.begin("demo-1", first, NO_PROCESS)
    assert queue.release("demo-1", first, QueueState.WAITING, "its process is gone", died=True)
    second = queue.claim("demo-1", "right", [0])
    with pytest.raises(StoreError, match="attempt 2"):
        queue.begin("demo-1", first, NO_PROCESS)
    assert not queue.release("demo-1", first, QueueState.ENDED, "a run that was given up")
    assert queue.entry("demo-1").num_failures == 1
    assert second == 2
    assert holders(cluster)["right"] == {0: "demo-1", 1: None}


def test_a_request_to_stop_reaches_a_run_and_changes_a_waiting_task_at_once(cluster: Settings) -> None:
    queue = Queue(cluster)
    assert queue.request_stop("demo-1", StopRequest.PAUSE).state is QueueState.PAUSED
    assert queue.claim("demo-1", "left", [0]) is None, "a paused task gets no GPU"
    queue.unpause("demo-1")
    with pytest.raises(StoreError, match="to unpause, expected a paused one"):
        queue.unpause("demo-1")
    attempt = queue.claim("demo-1", "left", [0])
    assert attempt is not None
    queue.begin("demo-1", attempt, NO_PROCESS)
    queue.request_stop("demo-1", StopRequest.CANCEL)
    queue.request_stop("demo-1", StopRequest.PREEMPT)
    assert queue.entry("demo-1").stop is StopRequest.CANCEL, "nothing less than what was asked before"
    queue.release("demo-1", attempt, QueueState.ENDED, "cancelled")
    with pytest.raises(StoreError, match="has ended"):
        queue.request_stop("demo-1", StopRequest.PAUSE)


@pytest.mark.parametrize(
    ("stop", "state"),
    [
        (StopRequest.CANCEL, QueueState.ENDED),
        (StopRequest.PAUSE, QueueState.PAUSED),
        (StopRequest.PREEMPT, QueueState.WAITING),
    ],
)
def test_a_claim_whose_run_has_not_begun_is_given_up_at_once(
    cluster: Settings, stop: StopRequest, state: QueueState
) -> None:
    queue = Queue(cluster)
    attempt = queue.claim("demo-1", "left", [0])
    assert attempt is not None
    assert queue.request_stop("demo-1", stop).state is state
    assert holders(cluster) == FREE
    with pytest.raises(StoreError):
        queue.begin("demo-1", attempt, NO_PROCESS)


def test_the_version_rises_when_another_plan_may_be_better_and_not_otherwise(cluster: Settings) -> None:
    queue, fleet = Queue(cluster), Fleet(cluster)
    before = queue.version()
    attempt = queue.claim("demo-1", "left", [0])
    assert attempt is not None
    queue.begin("demo-1", attempt, NO_PROCESS)
    queue.beat("demo-1", attempt)
    fleet.beat("left")
    assert queue.version() == before
    versions = [before]
    for change in (
        lambda: queue.release("demo-1", attempt, QueueState.ENDED, "done"),
        lambda: submit(cluster, "new-1"),
        lambda: fleet.lose("right", silent_since=datetime.now(UTC)),
        lambda: fleet.join("right", gpus=(0, 1), gpu_bytes=10, work_pool="alto-right"),
    ):
        change()
        versions.append(queue.version())
    assert versions == sorted(set(versions))


def test_a_lost_host_gets_no_task_and_comes_back_with_what_it_held(cluster: Settings) -> None:
    queue, fleet = Queue(cluster), Fleet(cluster)
    submit(cluster, "other-1")
    queue.claim("other-1", "left", [0])
    assert not fleet.lose("left", silent_since=datetime.now(UTC) - timedelta(minutes=1)), "it was heard of since"
    assert fleet.lose("left", silent_since=datetime.now(UTC))
    assert not fleet.beat("left")
    assert queue.claim("demo-1", "left", [1]) is None
    fleet.join("left", gpus=(0, 1), gpu_bytes=10, work_pool="alto-left")
    assert fleet.beat("left")
    assert holders(cluster)["left"] == {0: "other-1", 1: None}
    with pytest.raises(StoreError, match=r"GPU 0 too, which task other-1 holds"):
        fleet.join("left", gpus=(1,), gpu_bytes=10, work_pool="alto-left")
    fleet.join("left", gpus=(0, 5), gpu_bytes=10, work_pool="alto-left")
    assert holders(cluster)["left"] == {0: "other-1", 5: None}


def test_a_plan_is_kept_whole(cluster: Settings) -> None:
    now = datetime.now(UTC)
    place = KeptPlacement(task_id="demo-1", host_id="left", gpus=(0, 1), start=now, end=now + timedelta(seconds=60))
    plan = KeptPlan(
        at=now,
        reason="submitted demo-1",
        placements=(place,),
        refusals={"big-1": "num_gpus: got 9"},
        makespan=60,
        bound=60,
        gap=0.0,
        tardiness=0,
        method="longest",
        solver_status="",
        solve_seconds=0.01,
    )
    queue = Queue(cluster)
    assert queue.latest_plan() is None
    queue.keep_plan(replace(plan, reason="before"))
    queue.keep_plan(plan)
    assert queue.latest_plan() == plan


RIVAL = """
import json, sys, time
from alto_core.settings import load_settings
from alto_core.store import Fleet, Queue

queue = Queue(load_settings())
claims = []
time.sleep(max(0, float(sys.argv[1]) - time.time()))
for task_id in sys.argv[2:]:
    for host_id in ("left", "right"):
        for gpu in (0, 1):
            attempt = queue.claim(task_id, host_id, [gpu])
            if attempt is not None:
                claims.append([task_id, host_id, gpu])
print(json.dumps(claims))
"""


def test_three_schedulers_at_once_give_no_task_and_no_gpu_away_twice(cluster: Settings) -> None:
    task_ids = ["demo-1", *(f"many-{i}" for i in range(5))]
    for task_id in task_ids[1:]:
        submit(cluster, task_id)
    environment = {**os.environ, "ALTO_HOME": str(cluster.home), "ALTO_STORE_URL": cluster.store_address or ""}
    at = str(datetime.now(UTC).timestamp() + 3)
    rivals = [
        subprocess.Popen(
            [sys.executable, "-c", RIVAL, at, *task_ids], stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(3)
    ]
    claims = [claim for rival in rivals for claim in json.loads(rival.communicate(timeout=120)[0])]
    assert len(claims) == 4, "there are four GPUs"
    assert len({task_id for task_id, _, _ in claims}) == 4
    assert len({(host_id, gpu) for _, host_id, gpu in claims}) == 4
    held = {(h, gpu): task_id for h, gpus in holders(cluster).items() for gpu, task_id in gpus.items()}
    assert held == {(host_id, gpu): task_id for task_id, host_id, gpu in claims}


def test_a_store_of_the_first_version_is_brought_up_to_date(settings: Settings) -> None:
    store = Store(settings)
    store.add_task("old-1", make_task())
    store.close()
    with closing(sqlite3.connect(settings.home / "store.db")) as connection, connection:
        for table in ("alto_gpu", "alto_host", "alto_queue", "alto_plan", "alto_queue_event"):
            connection.execute(f"DROP TABLE {table}")
        connection.execute("UPDATE alto_schema SET version = 1")
    Queue(settings).submit("old-1", Demand(num_gpus=1, expected_seconds=1.0))
    assert Queue(settings).entry("old-1").state is QueueState.WAITING
    with closing(sqlite3.connect(settings.home / "store.db")) as connection:
        assert connection.execute("SELECT version FROM alto_schema").fetchall() == [(2,)]
