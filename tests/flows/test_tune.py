"""A whole task through the flow: real Prefect, MLflow on a file, a tiny model."""

from __future__ import annotations

import asyncio
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from peft import PeftModel
from prefect.client.orchestration import get_client
from transformers import AutoModelForCausalLM

from alto_core.config import TuningTask
from alto_core.domain import JobState, TaskState
from alto_core.errors import DataError, EngineError, TaskFileError
from alto_core.settings import load_settings
from alto_core.store import Store
from alto_core.tracking import Tracker
from alto_core.workspace import Workspace
from flows.api import TuneResult, leaderboard, tune
from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.slow]


@pytest.fixture(scope="module")
def first(
    tiny_task: Callable[..., TuningTask], tmp_path_factory: pytest.TempPathFactory, prefect_server: None
) -> TuneResult:
    """A task that has ended, for all tests that only look at one; its workspace is `shared_home`'s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALTO_HOME", str(tmp_path_factory.mktemp("first")))
        patch.setenv("ALTO_DEVICE", "cpu")
        return tune(tiny_task())


@pytest.fixture
def shared_home(first: TuneResult, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `ALTO_HOME` of the first task."""
    monkeypatch.setenv("ALTO_HOME", str(first.report.parents[2]))
    monkeypatch.setenv("ALTO_DEVICE", "cpu")


@pytest.mark.usefixtures("shared_home")
def test_what_is_scored_is_said_before_it_is_measured(first: TuneResult) -> None:
    said = [e.text for e in Store(load_settings()).events(first.task_id) if e.kind == "scoring"]
    assert len(said) == 2 and said[0].endswith("validation rows") and said[1].endswith("test rows")
    assert "adapter" in said[0] and said[1].startswith("1 adapter and the untuned model on ")


@pytest.mark.usefixtures("shared_home")
def test_the_example_in_python_says_what_a_task_came_to(
    first: TuneResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it, but that the task has been tuned already."""
    example = runpy.run_path(str(REPOSITORY / "examples" / "python_api.py"))
    monkeypatch.setitem(example["main"].__globals__, "tune", lambda task: first)
    file = tmp_path / "task.yaml"
    file.write_text(Store(load_settings()).task(first.task_id).task.model_dump_json(exclude_unset=True))
    example["main"](str(file))
    told = capsys.readouterr().out
    assert told.startswith("6 jobs, ")
    assert f"{first.winner}: {first.adapter_folder}, registered as tiny version 1" in told
    assert "untuned model" in told and told.rstrip().endswith("report.html")


@pytest.mark.usefixtures("shared_home")
def test_a_task_ends_with_a_registered_adapter_and_true_states(first: TuneResult) -> None:
    result, store, tracker = first, Store(load_settings()), Tracker(load_settings())
    jobs = {record.job_id: record for record in store.jobs(result.task_id)}

    assert result.state is TaskState.FINISHED
    assert all(record.state.is_end for record in jobs.values())
    assert {record.state for record in jobs.values()} >= {JobState.FINISHED, JobState.DIVERGING}
    assert jobs[result.winner].state in (JobState.FINISHED, JobState.OVERFITTING)
    assert 0 < result.samples_saved < 1

    runs = tracker.task_runs(result.task_id)
    client = MlflowClient(load_settings().mlflow_tracking_uri)
    for job_id, run_id in runs.job_run_ids.items():
        run = client.get_run(run_id)
        assert run.data.tags["alto.state"] == jobs[job_id].state.value, "the same word in MLflow and in the store"
        assert run.info.status == ("FINISHED" if jobs[job_id].state is JobState.FINISHED else "KILLED")
    parent = client.get_run(runs.parent_run_id)
    assert parent.info.status == "FINISHED"
    assert {"best_val_loss", "samples_saved", "survivors", "test_exact_match"} <= set(parent.data.metrics)
    answers = {item.path for item in client.list_artifacts(runs.parent_run_id, "answers")}
    assert answers == {"answers/validation.parquet", "answers/test.parquet"}
    version = client.get_model_version_by_alias("tiny", "champion")
    assert version.tags["alto.job_id"] == result.winner
    assert version.tags["alto.data_digest"]
    assert (result.report).is_file()

    page = result.report.read_text()
    assert "Winner minus untuned, paired over 8 rows" in page and "To the first prompts of the test split" in page

    table = leaderboard(result.task_id)
    assert table["job_id"].iloc[0] == result.winner
    assert set(table["job_id"]) == set(jobs)


@pytest.mark.usefixtures("shared_home")
def test_the_winners_folder_loads_in_peft_and_scores_what_was_reported(first: TuneResult, tiny_model: Path) -> None:
    reported = next(s for s in first.scores if s.job_id == first.winner and s.split == "validation")
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, first.adapter_folder).eval()

    total, labels = 0.0, 0
    for row in Workspace.open(first.task_id).data.validation.rows:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
        for position in range(1, len(row.token_ids)):
            if row.label_mask[position]:
                total -= float(logits[position - 1, row.token_ids[position]])
                labels += 1
    assert total / labels == pytest.approx(reported.loss, abs=1e-4)


@pytest.mark.usefixtures("shared_home")
def test_a_second_task_of_the_same_file_decides_the_same(
    first: TuneResult, tiny_task: Callable[..., TuningTask]
) -> None:
    second = tune(tiny_task())
    assert first.task_id != second.task_id
    columns = ["job_id", "state", "step", "gate_rank"]
    assert first.leaderboard[columns].equals(second.leaderboard[columns])
    assert first.winner == second.winner
    assert second.registered.version == first.registered.version + 1
    assert second.registered.aliases == ("challenger",)
    run_id = Store(load_settings()).task(second.task_id).flow_run_id
    (summary,) = (a for a in asyncio.run(_artifacts()) if a.key == "summary" and str(a.flow_run_id) == run_id)
    assert second.task_id in str(summary.description)
    for page in ("runs/", "compare-runs", "artifacts/report.html", "models/tiny"):
        assert "/#/" in summary.data and page in summary.data


@pytest.mark.usefixtures("workspace_home")
def test_a_task_whose_jobs_all_diverge_fails_with_the_reason(tiny_task: Callable[..., TuningTask]) -> None:
    space = {"learning_rate": 1e30, "lora_rank": [2, 4], "adapter_batch_size": 4, "max_grad_norm": 0}
    with pytest.raises(EngineError, match="no job left an adapter"):
        tune(tiny_task(search_space=space))
    (task,) = Store(load_settings()).tasks()
    assert task.state is TaskState.FAILED
    assert "no job left an adapter" in task.message
    assert {record.state for record in Store(load_settings()).jobs(task.task_id)} == {JobState.DIVERGING}


@pytest.mark.usefixtures("workspace_home")
def test_a_task_can_start_from_an_adapter_of_the_same_rank(tiny_task: Callable[..., TuningTask]) -> None:
    space = {"learning_rate": 1e-2, "lora_rank": 4, "adapter_batch_size": 4}
    first = tune(tiny_task(search_space=space))
    again = tune(tiny_task(search_space=space, init_adapter=str(first.adapter_folder)))
    curves = [
        Tracker(load_settings()).task_runs(result.task_id).read_curves()[result.winner] for result in (first, again)
    ]
    assert curves[1].val_losses[0] < min(curves[0].val_losses[:5])
    other = tiny_task(search_space=space | {"lora_rank": [2, 4]}, init_adapter=str(first.adapter_folder))
    with pytest.raises(TaskFileError, match=r"init_adapter: got an adapter of rank 4, expected one of rank 2"):
        tune(other)
    with pytest.raises(TaskFileError, match=r"init_adapter: got .*no-such"):
        tune(tiny_task(search_space=space, init_adapter=str(first.adapter_folder / "no-such")))


@pytest.mark.usefixtures("workspace_home")
def test_bad_data_is_refused_before_anything_is_created(tiny_task: Callable[..., TuningTask], tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError):
        tune(tiny_task(data={"source": str(tmp_path / "empty.jsonl")}))
    assert Store(load_settings()).tasks() == ()


async def _artifacts() -> list[Any]:
    async with get_client() as client:
        return list(await client.read_artifacts())


async def _flow_runs() -> list[tuple[str, str]]:
    async with get_client() as client:
        return [(run.name, run.state.name) for run in await client.read_flow_runs() if run.state]


@pytest.mark.usefixtures("workspace_home")
def test_an_interrupted_task_is_cancelled_everywhere(
    tiny_task: Callable[..., TuningTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    from alto_core.supervision import Supervisor

    calls = []
    judge = Supervisor._judge

    def interrupt_later(self: Supervisor, *args: object) -> object:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return judge(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Supervisor, "_judge", interrupt_later)
    with pytest.raises(KeyboardInterrupt):
        tune(tiny_task())
    store = Store(load_settings())
    (task,) = store.tasks()
    assert task.state is TaskState.CANCELLED
    states = {record.job_id: record.state for record in store.jobs(task.task_id)}
    assert JobState.CANCELLED in states.values()
    assert all(state.is_end for state in states.values())
    runs = Tracker(load_settings()).task_runs(task.task_id)
    client = MlflowClient(load_settings().mlflow_tracking_uri)
    tags = {job_id: client.get_run(run_id).data.tags["alto.state"] for job_id, run_id in runs.job_run_ids.items()}
    assert tags == {job_id: state.value for job_id, state in states.items()}
    assert (f"tune {task.task_id}", "Cancelled") in asyncio.run(_flow_runs())


def test_scores_carry_standard_errors_and_intervals(first: TuneResult) -> None:
    assert {score.split for score in first.scores} == {"validation", "test"}
    for score in first.scores:
        assert math.isfinite(score.loss)
        assert score.loss_standard_error > 0
        assert score.metric_value is not None
        assert score.metric_value.low <= score.metric_value.value <= score.metric_value.high
        assert score.metric_value.num_rows == 8
