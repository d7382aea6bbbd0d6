"""Registered adapters of a tiny model, made without a flow: what the tests of promotion and export share."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alto_core.config import TuningTask
from alto_core.settings import load_settings


def train_and_register(task: TuningTask, steps: int) -> int:
    """Train the one job of a new task for so many steps and register its adapter; returns the version."""
    from alto_core.preparation import create_task, plan_task
    from alto_core.registration import held_out, register_winner
    from alto_core.store import Store
    from alto_core.workspace import Workspace

    settings = load_settings()
    task_id = Store(settings).new_task_id(task.name)
    create_task(plan_task(task), task_id, settings)
    workspace = Workspace.open(task_id)
    ((job_id, job),) = workspace.jobs.items()
    rows = workspace.data.train.rows
    with workspace.engine([job_id], num_slots=1) as engine:
        engine.admit(job, workspace.budgets[job_id])
        for step in range(steps):
            start = step * 8 % (len(rows) - 8)
            engine.step({job_id: rows[start : start + 8]})
        engine.export(job_id, workspace.job_folder(job_id) / "adapter", best=False)
        losses = engine.evaluate([job_id], held_out(workspace).rows[:4], max_tokens=1000)[job_id]
    workspace.update_result(winner=job_id, check_losses=losses.loss_sums)
    return register_winner(workspace, job_id).version


@pytest.fixture(scope="session")
def register_tiny(tiny_task: Callable[..., TuningTask]) -> Callable[..., int]:
    """`register(steps, **sections)`: tunes a little and registers the adapter as `model`; returns its version."""

    def register(steps: int, **sections: Any) -> int:
        space = {"learning_rate": 1e-2, "lora_rank": 4, "adapter_batch_size": 8}
        fields = {"search_space": space, "evaluation": {}, "registry_name": "model", **sections}
        return train_and_register(tiny_task(**fields), steps)

    return register


@pytest.fixture(scope="session")
def home_with(
    tmp_path_factory: pytest.TempPathFactory, empty_database: Path, register_tiny: Callable[..., int]
) -> Callable[..., Path]:
    """`home_with(1, 40)`: a workspace in which adapters of so many steps are registered one after the other."""

    def make(*steps: int) -> Path:
        home = tmp_path_factory.mktemp("home")
        shutil.copy(empty_database, home / "mlflow.db")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ALTO_HOME", str(home))
            patch.setenv("ALTO_DEVICE", "cpu")
            for count in steps:
                register_tiny(count)
        return home

    return make
