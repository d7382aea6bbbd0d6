"""A task goes on after its run failed, was cancelled or was killed, and ends as one that was never interrupted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient
from typer.testing import CliRunner

from alto_core.config import TuningTask, load_task
from alto_core.domain import JobState, TaskState
from alto_core.settings import load_settings
from alto_core.store import Store
from alto_core.supervision import Supervisor
from alto_core.tracking import Tracker
from flows.api import TuneResult, resume, tune
from flows.cli.app import app
from flows.tune import tune_task
from flows.tune_file import tune_file

pytestmark = [pytest.mark.slow]
REPOSITORY = Path(__file__).resolve().parents[2]
SPACE = {"learning_rate": [1e-3, 1e-2, 1e30], "lora_rank": 4, "adapter_batch_size": 4}
BUDGET = {"steps": 12, "eval_interval_fraction": 0.25, "gate_warmup_fraction": 1 / 6}
EARLY_EXIT = {"overrides": {"select_ratio": 1.0, "rung_select_ratio": 0.5}}
"""All that do not diverge pass the first gate, after step 2; one of them the second, after step 4."""


@pytest.fixture
def task(tiny_task: Callable[..., TuningTask], monkeypatch: pytest.MonkeyPatch) -> TuningTask:
    monkeypatch.setenv("ALTO_CHECKPOINT_SECONDS", "0")
    return tiny_task(search_space=SPACE, budget=BUDGET, early_exit=EARLY_EXIT, max_slots=2)


@pytest.fixture
def fail_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, BaseException], None]:
    """Raises an error in place of the n-th verdicts of a task."""

    def install(number: int, error: BaseException) -> None:
        calls, judge = [], Supervisor._judge

        def fail_once(self: Supervisor, *args: object) -> object:
            calls.append(1)
            if len(calls) == number:
                raise error
            return judge(self, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(Supervisor, "_judge", fail_once)

    return install


def told(result: TuneResult) -> tuple[object, ...]:
    """What must be equal: leaderboard, winner, scores, and every point of every job, each once."""
    columns = ["job_id", "state", "step", "gate_rank", "best_val_loss"]
    board = [list(map(repr, row)) for row in result.leaderboard[columns].itertuples(index=False)]
    client = MlflowClient(load_settings().mlflow_tracking_uri)
    runs = Tracker(load_settings()).task_runs(result.task_id)
    points = {}
    for job_id, run_id in runs.job_run_ids.items():
        for key in client.get_run(run_id).data.metrics:
            points[job_id, key] = sorted((p.step, repr(p.value)) for p in client.get_metric_history(run_id, key))
    return board, result.winner, result.scores, points


@pytest.mark.usefixtures("prefect_server", "workspace_home")
def test_an_interrupted_task_ends_as_an_unbroken_one(
    task: TuningTask, fail_at: Callable[[int, BaseException], None]
) -> None:
    """K2, K6: it fails, Prefect runs its flow again, a person cancels that and resumes. Nothing is done twice."""
    unbroken = tune(task)
    store, client = Store(load_settings()), MlflowClient(load_settings().mlflow_tracking_uri)
    task_id = store.new_task_id(task.name)
    fail_at(2, RuntimeError("boom"))
    with pytest.raises(RuntimeError, match="boom"):
        tune(task, task_id=task_id)
    assert store.task(task_id).state is TaskState.FAILED
    fail_at(3, KeyboardInterrupt())
    tune_task(task_id, return_state=True)
    assert store.task(task_id).state is TaskState.CANCELLED
    assert [event.kind for event in store.events(task_id)].count("gate") == 1, "it stands between its gates"
    run_ids = Tracker(load_settings()).task_runs(task_id).job_run_ids
    ended = {
        record.job_id: client.get_run(run_ids[record.job_id]).info.end_time
        for record in store.jobs(task_id)
        if record.state is JobState.DIVERGING
    }
    assert ended, "a job is meant to have ended before"

    result = resume(task_id)

    assert told(result) == told(unbroken)
    gates = [event.text for event in store.events(task_id) if event.kind == "gate"]
    assert [text[:7] for text in gates] == ["2 go on", "1 go on"]
    runs = Tracker(load_settings()).task_runs(task_id)
    assert runs.job_run_ids == run_ids, "the same runs went on"
    assert client.get_run(runs.parent_run_id).info.status == "FINISHED"
    for job_id, end_time in ended.items():
        assert client.get_run(run_ids[job_id]).info.end_time == end_time, "an ended job is left alone"
    assert len(client.search_model_versions(f"run_id = '{run_ids[result.winner]}'")) == 1
    events = [(e.job_id, e.numbers["step"]) for e in store.events(task_id) if e.kind == "evaluation"]
    assert len(events) == len(set(events))
    refused = CliRunner().invoke(app, ["resume", task_id])
    assert (refused.exit_code, "has finished" in refused.stderr) == (7, True)


@pytest.mark.usefixtures("prefect_server", "workspace_home")
def test_a_retry_by_prefect_goes_on_with_the_task(
    task: TuningTask, fail_at: Callable[[int, BaseException], None], tmp_path: Path
) -> None:
    """K6: a second task would repeat what the first has done."""
    file = tmp_path / "task.yaml"
    file.write_text(yaml.safe_dump(task.model_dump(mode="json", exclude_none=True)))
    fail_at(3, RuntimeError("boom"))
    assert tune_file.with_options(retries=1)(str(file)) == "tiny/1"
    (record,) = Store(load_settings()).tasks()
    assert record.state is TaskState.FINISHED
    kinds = [event.kind for event in Store(load_settings()).events(record.task_id)]
    assert (kinds.count("resumed"), kinds.count("registered")) == (1, 1)


@pytest.mark.usefixtures("prefect_server", "workspace_home")
def test_a_change_is_refused_by_name_until_it_is_put_back(
    task: TuningTask, fail_at: Callable[[int, BaseException], None], tmp_path: Path
) -> None:
    content = task.model_dump(mode="json", exclude_none=True)
    file = tmp_path / "task.yaml"
    file.write_text(yaml.safe_dump(content))
    fail_at(2, RuntimeError("boom"))
    store = Store(load_settings())
    task_id = store.new_task_id(task.name)
    with pytest.raises(RuntimeError):
        tune(load_task(file), task_id=task_id, task_file=file)
    changed = {**content, "search_space": {**content["search_space"], "lora_rank": [8]}}
    file.write_text(yaml.safe_dump(changed))
    refused = CliRunner().invoke(app, ["resume", task_id])
    assert refused.exit_code == 2
    assert "search_space.lora_rank: got [8], expected [4], as when the task began" in refused.stderr
    assert store.task(task_id).state is TaskState.FAILED
    assert CliRunner().invoke(app, ["resume", task_id, "--as-recorded", "--plain"]).exit_code == 0
    assert store.task(task_id).state is TaskState.FINISHED


def test_a_killed_task_ends_as_an_unbroken_one(tmp_path: Path) -> None:
    """K1, K2, K6, P1: SIGKILL in three stages; benchmarks/faults.py has forty of them, with Prefect."""
    command = [sys.executable, "benchmarks/faults.py", "--count", "3", "--core", "--folder", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    environ.pop("PREFECT_API_URL", None)
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=540, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "3 of 3 equal" in done.stdout
