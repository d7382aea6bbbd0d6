"""The commands of the cluster on a store: what they print and what they change."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from alto_core.config import TuningTask
from alto_core.domain import TaskState
from alto_core.queue_states import Priority, QueueState, StopRequest
from alto_core.settings import Settings
from alto_core.store import Demand, Fleet, KeptPlacement, KeptPlan, Queue, Store
from tests.conftest import NO_PROCESS

from .conftest import Invoke


@pytest.fixture
def task_file(tiny_model: Path, tiny_rows: Path, tmp_path: Path) -> Path:
    content = {
        "name": "tiny",
        "model": {"name": str(tiny_model)},
        "data": {"source": str(tiny_rows), "validation": {"rows": 8}},
        "search_space": {"learning_rate": [1e-3, 1e-2], "lora_rank": 2, "adapter_batch_size": 4},
        "budget": {"steps": 20},
        "cluster": {"deadline": "2100-01-01T00:00:00+01:00", "min_gpu_gib": 0.5},
    }
    file = tmp_path / "task.yaml"
    file.write_text(json.dumps(content))
    return file


@pytest.fixture
def queued(settings: Settings, task: TuningTask) -> str:
    """A task that waits, and a host that could run it."""
    Fleet(settings).join("left", gpus=(0, 1), gpu_bytes=0, work_pool="alto-left")
    Store(settings).add_task("made-1", task)
    Queue(settings).submit("made-1", Demand(num_gpus=2, expected_seconds=600.0))
    return "made-1"


def test_a_submitted_task_is_recorded_with_what_it_asks_for(
    invoke: Invoke, settings: Settings, task_file: Path
) -> None:
    result = invoke("submit", str(task_file), "--set", "cluster.priority=urgent", "--set", "owner=ann", "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout.splitlines()[-1])
    assert (content["event"], content["num_jobs"], content["priority"]) == ("submitted", 2, "urgent")
    entry = Queue(settings).entry(content["task_id"])
    assert (entry.owner, entry.demand.priority, entry.demand.min_gpu_bytes) == ("ann", Priority.URGENT, 2**29)
    assert entry.demand.deadline is not None and entry.demand.deadline.isoformat() == "2099-12-31T23:00:00+00:00"
    assert entry.demand.expected_seconds == 3600, "nothing is known of this model"
    assert len(Store(settings).jobs(entry.task_id)) == 2

    assert "planned as 1 h 00 min: this model has not run yet" in invoke("clone", entry.task_id).stdout
    known = invoke("clone", entry.task_id, "--set", "cluster.expected_minutes=90").stdout
    assert "expected to take 1 h 30 min at most" in known
    assert "waits until a host is there: `alto up`" in known
    Fleet(settings).join("left", gpus=(0,), gpu_bytes=0, work_pool="alto-left")

    clone = invoke("clone", entry.task_id, "--set", "search_space.lora_rank=[2, 4]", "--set", "cluster.num_gpus=2")
    assert clone.exit_code == 0, clone.output
    assert "tiny-4: 4 jobs, 2 GPUs, urgent" in clone.stdout
    assert "waits until" not in clone.stdout
    refused = invoke("clone", entry.task_id, "--from-winner")
    assert (refused.exit_code, "one that has registered a winner" in refused.stderr) == (7, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("cluster.num_gpus=0", "cluster.num_gpus: got 0"),
        ("cluster.num_gpus=-1", "cluster.num_gpus: got -1"),
        ("cluster.priority=soon", "cluster.priority"),
        ("cluster.deadline=2030-01-01T00:00:00", "with a time zone"),
        ("cluster.nothing=1", "nothing"),
        ("name.first=1", "got name, which is no section"),
        ("budget", "expected key=value"),
    ],
)
def test_a_wrong_change_is_refused_and_nothing_is_submitted(
    invoke: Invoke, settings: Settings, task_file: Path, change: str, message: str
) -> None:
    result = invoke("submit", str(task_file), "--set", change)
    assert result.exit_code == 2
    assert message in result.stderr
    assert Queue(settings).entries() == ()


def test_the_queue_shows_tasks_and_hosts(invoke: Invoke, settings: Settings, queued: str) -> None:
    text = invoke("queue").stdout
    assert "made-1" in text
    assert "0: free  1: free" in text
    Queue(settings).claim(queued, "left", [0, 1])
    assert "left, GPU 0, 1" in invoke("queue").stdout
    lines = [json.loads(line) for line in invoke("queue", "--json").stdout.splitlines()]
    assert [(line["event"], line.get("state")) for line in lines] == [("queued", "claimed"), ("host", None)]
    assert lines[1]["holders"] == {"0": "made-1", "1": "made-1"}


def test_a_task_of_the_queue_says_what_it_waits_for(invoke: Invoke, settings: Settings, queued: str) -> None:
    def told() -> str:
        texts = [invoke("queue").stdout, invoke("status", queued).stdout]
        (place,) = re.findall(r"in the queue: (\w+, .*)", texts[1])
        assert place.partition(", ")[2] in texts[0], "both commands say the same"
        return str(place)

    def plan_for(start: timedelta, end: timedelta) -> None:
        now = datetime.now(UTC)
        place = KeptPlacement(task_id=queued, host_id="left", gpus=(0, 1), start=now + start, end=now + end)
        kept = KeptPlan(at=now, reason="", placements=(place,), refusals={}, makespan=1, bound=1, gap=0.0, tardiness=0,
                        method="", solver_status="", solve_seconds=0.0)  # fmt: skip
        queue.keep_plan(kept)

    queue, hour = Queue(settings), timedelta(hours=1)
    assert told() == "waiting, not planned yet"
    plan_for(hour - timedelta(seconds=0.5), 2 * hour)
    assert told().startswith("waiting, starts in 59 min")
    plan_for(-hour, hour - timedelta(seconds=0.5))
    assert told() == "waiting, starts next"
    invoke("pause", queued)
    assert told() == f"paused, until `alto unpause {queued}`"
    invoke("unpause", queued)
    attempt = queue.claim(queued, "left", [0, 1])
    assert attempt is not None and told() == "claimed, left, GPU 0, 1; its run starts"
    queue.begin(queued, attempt, os.getpid())
    assert told().startswith("running, left, GPU 0, 1; at most 59 min")
    plan_for(-hour, -hour)
    assert told() == "running, left, GPU 0, 1; late"
    queue.release(queued, attempt, QueueState.WAITING, "made room")
    Fleet(settings).leave("left")
    assert told() == "waiting, until a host is there: `alto up` starts one"
    assert "gone" in invoke("queue").stdout
    queue.request_stop(queued, StopRequest.CANCEL)
    assert "in the queue" not in invoke("status", queued).stdout


def test_an_empty_cluster_says_what_to_do(invoke: Invoke) -> None:
    text = invoke("queue").stdout
    assert "`alto submit FILE`" in text
    assert "`alto up`" in text
    assert "Nothing to plan" in invoke("plan").stdout
    assert "Nothing was dead" in invoke("reconcile").stdout


def test_the_plan_is_shown_and_written_and_starts_nothing(
    invoke: Invoke, settings: Settings, queued: str, task: TuningTask, tmp_path: Path
) -> None:
    Store(settings).add_task("huge-1", task)
    Queue(settings).submit("huge-1", Demand(num_gpus=3, expected_seconds=1.0))
    for name in ("plan.svg", "plan.html"):
        result = invoke("plan", "--out", str(tmp_path / name))
        assert result.exit_code == 0, result.output
        assert "made-1" in (tmp_path / name).read_text()
    assert "left 0 |aaaa" in result.stdout
    assert "huge-1 cannot be planned: num_gpus: got 3, expected at most 2" in result.stdout
    assert "best plan; by longest, 0." in result.stdout
    assert Queue(settings).entry(queued).state is QueueState.WAITING
    (content,) = (json.loads(line) for line in invoke("plan", "--json").stdout.splitlines())
    assert (content["makespan"], content["bound"], content["gap"]) == (600, 600, 0)
    refused = invoke("plan", "--out", str(tmp_path / "plan.png"))
    assert (refused.exit_code, "ends in .svg or .html" in refused.stderr) == (2, True)
    Queue(settings).claim(queued, "left", [0, 1])
    assert "above the best plan\n" in invoke("plan").stdout, "what runs was placed by nobody now"


def test_a_waiting_task_is_paused_and_let_go_again(invoke: Invoke, settings: Settings, queued: str) -> None:
    assert "made-1: paused" in invoke("pause", queued).stdout
    assert Queue(settings).entry(queued).state is QueueState.PAUSED
    assert "waits for GPUs" in invoke("unpause", queued).stdout
    assert Queue(settings).entry(queued).state is QueueState.WAITING
    refused = invoke("unpause", queued)
    assert (refused.exit_code, "got state waiting to unpause, expected a paused one" in refused.stderr) == (7, True)
    assert invoke("pause", "nobody-1").exit_code == 7


def test_a_waiting_task_is_cancelled_in_every_record(invoke: Invoke, settings: Settings, task_file: Path) -> None:
    task_id = json.loads(invoke("submit", str(task_file), "--json").stdout.splitlines()[-1])["task_id"]
    result = invoke("cancel", task_id)
    assert f"{task_id}: cancelled" in result.stdout, result.output
    assert Queue(settings).entry(task_id).state is QueueState.ENDED
    assert Store(settings).task(task_id).state is TaskState.CANCELLED
    from mlflow import MlflowClient

    run = MlflowClient(settings.mlflow_tracking_uri).get_run(Store(settings).task(task_id).parent_run_id)
    assert run.info.status == "KILLED"
    refused = invoke("cancel", task_id)
    assert (refused.exit_code, "has ended (cancelled), expected one in the queue to cancel" in refused.stderr) == (
        7,
        True,
    )


def test_reconcile_says_what_it_found(
    invoke: Invoke, settings: Settings, queued: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(settings)
    queue.claim(queued, "left", [0, 1])
    queue.begin(queued, 1, NO_PROCESS)
    monkeypatch.setenv("ALTO_LEASE_SECONDS", "5")
    import time

    time.sleep(5.5)
    lines = [json.loads(line) for line in invoke("reconcile", "--json").stdout.splitlines()]
    assert {line["task_id"] for line in lines} == {None, queued}
    assert queue.entry(queued).state is QueueState.WAITING


def test_reconcile_ends_a_task_whose_command_was_killed(invoke: Invoke, settings: Settings, task: TuningTask) -> None:
    store = Store(settings)
    store.add_task("made-1", task)
    store.start_task("made-1")
    assert "made-1" in invoke("reconcile").stdout
    assert store.task("made-1").state is TaskState.FAILED
    assert "Nothing was dead" in invoke("reconcile").stdout


@pytest.mark.parametrize("gpus", ["", "a", "0,0", "0,-1", "0,1,"])
def test_up_refuses_a_list_that_names_no_gpus(invoke: Callable[..., Any], gpus: str) -> None:
    result = invoke("up", "--gpus", gpus)
    assert result.exit_code == 2
    assert "--gpus" in result.stderr
