"""A finished task's early exits: explained, replayed, revived, audited, cleaned. One real task for all tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from alto_core.config import parse_task
from alto_core.curve_files import read_recording
from alto_core.domain import JobState
from alto_core.errors import StoreError
from alto_core.parking import parked_jobs
from alto_core.replay import replay_recording
from alto_core.settings import load_settings
from alto_core.workspace import Workspace
from flows.api import TuneResult, tune
from flows.cli.app import app

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("parked")]


@pytest.fixture(scope="module")
def finished(
    prefect_server: None, tiny_model: Path, tiny_rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TuneResult]:
    """Eight jobs: one diverges, most are underperforming."""
    home = tmp_path_factory.mktemp("parked") / "alto"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALTO_HOME", str(home))
        patch.setenv("ALTO_DEVICE", "cpu")
        patch.setenv("COLUMNS", "150")
        home.mkdir()
        content = {
            "name": "tiny",
            "model": {"name": str(tiny_model)},
            "data": {"source": str(tiny_rows), "validation": {"rows": 8}},
            "search_space": {
                "learning_rate": [1e-4, 1e-3, 1e-2, 1e30],
                "lora_rank": [2, 4],
                "adapter_batch_size": 4,
            },
            "budget": {"steps": 20, "eval_interval_fraction": 0.05, "gate_warmup_fraction": 0.2},
            "evaluation": {"metric": "exact_match", "max_new_tokens": 6},
        }
        yield tune(parse_task(content))


@pytest.fixture
def workspace(finished: TuneResult) -> Workspace:
    return Workspace.open(finished.task_id)


def alto(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_gate_exit_is_explained_with_its_neighbours(workspace: Workspace) -> None:
    job_id = workspace.ended_as(JobState.UNDERPERFORMING)[0]
    content = json.loads(alto("explain", workspace.task_id, job_id, "--json"))
    record = workspace.records()[job_id]
    assert (content["state"], content["reason"]) == ("underperforming", record.reason)
    assert content["evidence"]["gate_rank"] == record.gate_rank
    places = {line["job_id"]: line for line in content["neighbours"]}
    assert places[job_id]["place"] == record.gate_rank and places[job_id]["kept"] is False
    assert content["neighbours"][0]["place"] == 1
    text = alto("explain", workspace.task_id, job_id[:-2])
    for part in (record.reason.split(";")[0], "The numbers compared", "went on", "●", "100 % of the budget"):
        assert part in text, part
