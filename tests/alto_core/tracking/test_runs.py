"""The runs of a task: opened once, found again, ended with their true state."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.entities import ViewType

from alto_core.domain import JobState, TaskState
from alto_core.errors import TrackingError
from alto_core.outcomes import Interval, JobOutcome, Score
from alto_core.settings import Settings
from alto_core.tracking import Tracker


def all_runs(tracker: Tracker) -> list[Any]:
    client = tracker._connection.client
    ids = [experiment.experiment_id for experiment in client.search_experiments(view_type=ViewType.ALL)]
    return list(client.search_runs(ids, run_view_type=ViewType.ALL))


def test_a_task_is_a_parent_and_a_child_per_job(tracker: Tracker, open_runs: Any, make: SimpleNamespace) -> None:
    runs, ids = open_runs(3)
    client = tracker._connection.client
    assert list(runs.job_run_ids) == ids
    assert len(all_runs(tracker)) == 4
    parent = client.get_run(runs.parent_run_id)
    assert parent.info.run_name == "demo-1"
    assert parent.info.experiment_id == runs.experiment_id
    assert parent.data.params["model"] == "org/tiny"
    assert client.get_experiment(runs.experiment_id).name == "org/tiny on rows"
    for job, (job_id, run_id) in zip(make.jobs(3), runs.job_run_ids.items(), strict=True):
        child = client.get_run(run_id)
        assert child.info.run_name == job_id == job.job_id
        assert child.data.tags["mlflow.parentRunId"] == runs.parent_run_id
        assert child.data.tags["alto.state"] == "waiting"
        assert float(child.data.params["learning_rate"]) == job.learning_rate
        assert child.data.params["total_steps"] == "400"
    for run_id in (runs.parent_run_id, *runs.job_run_ids.values()):
        (used,) = client.get_run(run_id).inputs.dataset_inputs
        assert (used.dataset.name, used.dataset.digest) == ("rows", "d1")
        assert json.loads(used.dataset.profile)["num_train"] == 800


def test_a_task_opened_again_keeps_its_runs(tracker: Tracker, embedded: Settings, make: SimpleNamespace) -> None:
    first = tracker.open_task(make.task(), "demo-1", make.jobs(3), make.data)
    again = Tracker(embedded).open_task(make.task(), "demo-1", make.jobs(3), make.data)
    assert again.parent_run_id == first.parent_run_id
    assert again.job_run_ids == first.job_run_ids == tracker.task_runs("demo-1").job_run_ids
    assert len(all_runs(tracker)) == 4


def test_an_opening_that_was_cut_short_is_completed(tracker: Tracker, make: SimpleNamespace, monkeypatch: Any) -> None:
    client = tracker._connection.client
    create_run, count = client.create_run, iter(range(3))

    def create_three(*args: Any, **kwargs: Any) -> Any:
        if next(count, None) is None:
            raise KeyboardInterrupt
        return create_run(*args, **kwargs)

    monkeypatch.setattr(client, "create_run", create_three)
    with pytest.raises(KeyboardInterrupt):
        tracker.open_task(make.task(), "demo-1", make.jobs(5), make.data)
    monkeypatch.undo()
    runs = tracker.open_task(make.task(), "demo-1", make.jobs(5), make.data)
    assert len(runs.job_run_ids) == 5
    assert len(all_runs(tracker)) == 6


def test_a_task_id_of_another_task_file_is_refused(tracker: Tracker, make: SimpleNamespace) -> None:
    tracker.open_task(make.task(), "demo-1", make.jobs(1), make.data)
    with pytest.raises(TrackingError, match="new task"):
        tracker.open_task(make.task(owner="else"), "demo-1", make.jobs(1), make.data)


def test_two_homes_on_one_database_keep_their_tasks_apart(
    tracker: Tracker, embedded: Settings, tmp_path: Path, make: SimpleNamespace
) -> None:
    mine = tracker.open_task(make.task(), "demo-1", make.jobs(1), make.data)
    other_home = Settings(
        home=tmp_path / "other", device=None, mlflow_tracking_uri=embedded.mlflow_tracking_uri, prefect_api_url=None
    )
    theirs = Tracker(other_home).open_task(make.task(owner="else"), "demo-1", make.jobs(1), make.data)
    assert theirs.parent_run_id != mine.parent_run_id
    assert theirs.experiment_id == mine.experiment_id


def test_a_deleted_experiment_is_told_with_the_way_out(tracker: Tracker, open_runs: Any, make: SimpleNamespace) -> None:
    runs, _ = open_runs(1)
    tracker._connection.client.delete_experiment(runs.experiment_id)
    with pytest.raises(TrackingError, match="mlflow experiments restore"):
        tracker.open_task(make.task(), "demo-2", make.jobs(1), make.data)


def test_a_deleted_run_is_told_and_not_made_twice(tracker: Tracker, open_runs: Any, make: SimpleNamespace) -> None:
    runs, ids = open_runs(2)
    tracker._connection.client.delete_run(runs.job_run_ids[ids[1]])
    with pytest.raises(TrackingError, match="mlflow runs restore"):
        tracker.open_task(make.task(), "demo-1", make.jobs(2), make.data)
    assert len(all_runs(tracker)) == 3


@pytest.mark.parametrize("task_id", ["nope-1", "x' or 1=1", ""])
def test_an_unknown_task_is_refused(tracker: Tracker, task_id: str) -> None:
    with pytest.raises(TrackingError, match="task"):
        tracker.task_runs(task_id)


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (JobState.FINISHED, "FINISHED"),
        (JobState.FAILED, "FAILED"),
        (JobState.DIVERGING, "KILLED"),
        (JobState.OVERFITTING, "KILLED"),
        (JobState.UNDERPERFORMING, "KILLED"),
        (JobState.CANCELLED, "KILLED"),
        (JobState.RUNNING, "RUNNING"),
    ],
)
def test_each_state_of_a_job_shows_in_mlflow(tracker: Tracker, open_runs: Any, state: JobState, status: str) -> None:
    runs, (job_id,) = open_runs(1)
    runs.set_job_state(job_id, state, reason="because\nof this", gate_rank=3, extra_tags={"a=b": "c"})
    runs.flush()
    run = tracker._connection.client.get_run(runs.job_run_ids[job_id])
    assert run.info.status == status
    assert (run.info.end_time is not None) == state.is_end
    assert run.data.tags["alto.state"] == state.value
    assert run.data.tags["alto.reason"] == "because\nof this"
    assert run.data.tags["alto.gate_rank"] == "3"
    assert run.data.tags["a:3d:b"] == "c"


def test_a_job_that_runs_again_is_open_again(tracker: Tracker, open_runs: Any) -> None:
    runs, (job_id,) = open_runs(1)
    runs.set_job_state(job_id, JobState.CANCELLED, reason="asked to")
    runs.flush()
    runs.set_job_state(job_id, JobState.RUNNING)
    runs.flush()
    run = tracker._connection.client.get_run(runs.job_run_ids[job_id])
    assert (run.info.status, run.data.tags["alto.state"], run.data.tags["alto.reason"]) == ("RUNNING", "running", "")


@pytest.mark.parametrize(
    ("state", "status"),
    [(TaskState.FINISHED, "FINISHED"), (TaskState.FAILED, "FAILED"), (TaskState.CANCELLED, "KILLED")],
)
def test_closing_ends_the_parent_and_every_open_child(
    tracker: Tracker, open_runs: Any, state: TaskState, status: str
) -> None:
    runs, ids = open_runs(3)
    runs.set_job_state(ids[0], JobState.FINISHED)
    runs.set_job_state(ids[1], JobState.RUNNING)
    runs.close(state, "no disk")
    runs.release()
    client = tracker._connection.client
    assert client.get_run(runs.parent_run_id).info.status == status
    children = [client.get_run(run_id) for run_id in runs.job_run_ids.values()]
    assert [child.info.status for child in children] == ["FINISHED", "KILLED", "KILLED"]
    assert [child.data.tags["alto.state"] for child in children] == ["finished", "cancelled", "cancelled"]
    assert "no disk" in children[1].data.tags["alto.reason"]


def test_a_sweep_ends_what_a_killed_process_left_open(tracker: Tracker, open_runs: Any) -> None:
    runs, ids = open_runs(2)
    runs.set_job_state(ids[0], JobState.RUNNING)
    runs.flush()
    del runs
    swept = tracker.task_runs("demo-1")
    swept.close(TaskState.FAILED, "the process died")
    swept.release()
    assert {run.info.status for run in all_runs(tracker)} == {"FAILED", "KILLED"}


def test_summaries_are_metrics_of_child_and_parent(tracker: Tracker, open_runs: Any) -> None:
    runs, (good, bad) = open_runs(2)
    outcome = JobOutcome(
        job_id=good, state=JobState.OVERFITTING, reason="", step=100, total_steps=400, best_step=80, best_val_loss=0.5
    )
    runs.log_job_summary(outcome)
    nothing = JobOutcome(
        job_id=bad, state=JobState.DIVERGING, reason="", step=2, total_steps=400, best_step=None, best_val_loss=None
    )
    runs.log_job_summary(nothing)
    runs.log_task_summary(survivors=1, exited=1, samples_saved=0.75, tokens_per_second=10.0, best_val_loss=0.5)
    match = Interval(value=0.9, low=0.8, high=1.0, num_rows=9)
    runs.log_scores(
        [Score(job_id=None, split="test", loss=1.0, loss_standard_error=0.1, metric="match@1", metric_value=match)]
    )
    runs.flush()
    client = tracker._connection.client
    metrics = client.get_run(runs.job_run_ids[good]).data.metrics
    assert metrics == {"samples": 400.0, "samples_saved": 1200.0, "best_val_loss": 0.5, "best_step": 80.0}
    assert "best_val_loss" not in client.get_run(runs.job_run_ids[bad]).data.metrics
    parent = client.get_run(runs.parent_run_id).data.metrics
    assert parent["best_val_loss"] == 0.5
    assert parent["samples_saved"] == 0.75
    assert parent["untuned_test_match:40:1"] == 0.9


def test_the_best_job_is_found_among_diverged_ones(tracker: Tracker, open_runs: Any, make: SimpleNamespace) -> None:
    runs, ids = open_runs(3)
    for job_id, loss in zip(ids, (math.nan, math.inf, 1.5), strict=True):
        runs.log_evaluations([make.evaluation(job_id, 4, (loss,))])
        runs.set_job_state(job_id, JobState.FINISHED if math.isfinite(loss) else JobState.DIVERGING)
    runs.flush()
    found = tracker._connection.client.search_runs(
        [runs.experiment_id], "tags.`alto.state` = 'finished' and metrics.val_loss < 1e6"
    )
    assert [run.info.run_id for run in found] == [runs.job_run_ids[ids[2]]]


def test_artifacts_lie_under_the_workspace(
    tracker: Tracker, open_runs: Any, embedded: Settings, tmp_path: Path
) -> None:
    runs, _ = open_runs(1)
    file = tmp_path / "report.html"
    file.write_text("<p>")
    runs.log_artifact(file, "report")
    runs.log_text("# Summary", "summary.md")
    runs.flush()
    paths = [item.path for item in tracker._connection.client.list_artifacts(runs.parent_run_id)]
    assert paths == ["report", "summary.md", "task.json"]
    assert list(embedded.artifacts.rglob("report.html"))


def test_an_artifact_cannot_leave_its_folder(open_runs: Any) -> None:
    runs, _ = open_runs(1)
    for name in ("../../evil.txt", "/etc/evil.txt"):
        with pytest.raises(TrackingError, match="expected one inside"):
            runs.log_text("x", name)


def test_the_machine_is_watched_on_the_tasks_own_run(tracker: Tracker, open_runs: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    runs, _ = open_runs(1)
    client = tracker._connection.client
    for times in (1, 2):
        with runs.system_metrics():
            deadline = time.monotonic() + 60
            while not _watched(client, runs.parent_run_id, times) and time.monotonic() < deadline:
                time.sleep(0.1)
        assert _watched(client, runs.parent_run_id, times), "a second stretch goes on where the first one ended"


def _watched(client: Any, run_id: str, times: int) -> bool:
    history = client.get_metric_history(run_id, "system/cpu_utilization_percentage")
    return len({point.step for point in history}) >= times
