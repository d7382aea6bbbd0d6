"""What the tracking tests share: an embedded MLflow that is ready at once, and made-up measurements."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from alto_core.config import TuningTask, parse_task
from alto_core.domain import Evaluation, LoraJob, RowLosses, StepRecord
from alto_core.settings import Settings
from alto_core.tracking import DatasetSummary, Tracker


def make_task(**changes: object) -> TuningTask:
    content = {
        "name": "demo",
        "model": {"name": "org/tiny"},
        "data": {"source": "rows.jsonl"},
        "search_space": {"learning_rate": [1e-3], "lora_rank": [8]},
        "budget": {"steps": 400, "gate_warmup_fraction": 0.1},
    }
    return parse_task({**content, **changes})


def make_jobs(count: int) -> tuple[LoraJob, ...]:
    return tuple(
        LoraJob(
            learning_rate=1e-4 * (i + 1), lora_rank=8, lora_alpha=16.0, adapter_batch_size=4, target_modules=("q_proj",)
        )
        for i in range(count)
    )


def make_steps(job_id: str, first: int, last: int, *, offset: float = 0.0) -> tuple[StepRecord, ...]:
    return tuple(
        StepRecord(
            job_id=job_id,
            step=step,
            train_loss=offset + 2.0 / step,
            learning_rate=1e-3,
            grad_norm=0.5,
            num_tokens=100,
        )
        for step in range(first, last + 1)
    )


def make_evaluation(job_id: str, step: int, losses: Sequence[float] = (1.5, 2.25, 0.1)) -> Evaluation:
    rows = RowLosses(loss_sums=tuple(losses), num_labels=tuple(range(1, len(losses) + 1)))
    return Evaluation(job_id=job_id, step=step, fraction=step / 400, row_losses=rows)


@pytest.fixture
def make() -> SimpleNamespace:
    """Makers of tasks, jobs and measurements."""
    data = DatasetSummary(
        name="rows", source="rows.jsonl", digest="d1", num_train=800, num_validation=80, num_test=0, num_tokens=9000
    )
    return SimpleNamespace(task=make_task, jobs=make_jobs, steps=make_steps, evaluation=make_evaluation, data=data)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A folder with the files of an exported adapter; their content does not matter here."""
    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/tiny", "r": 8}))
    (folder / "adapter_model.safetensors").write_bytes(b"\1" * 1000)
    return folder


@pytest.fixture
def tracker(embedded: Settings) -> Tracker:
    return Tracker(embedded)


@pytest.fixture
def open_runs(tracker: Tracker, make: SimpleNamespace) -> Callable[[int], tuple[object, list[str]]]:
    """Opens task `demo-1` with so many jobs; gives its runs and the job ids."""

    def open_task(count: int) -> tuple[object, list[str]]:
        jobs = make.jobs(count)
        return tracker.open_task(make.task(), "demo-1", jobs, make.data), [job.job_id for job in jobs]

    return open_task
