"""What a task began with is compared by field; no change is passed over without a word."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from alto_core.config import load_task
from alto_core.errors import TaskFileError
from alto_core.inputs import record_inputs, refuse_changes


@pytest.fixture
def begun(tmp_path: Path) -> dict[str, Any]:
    """A task file with files of its own, and the folder of a task that began with it."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "held-out.jsonl").write_text('{"text": "b"}\n')
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    content = {
        "name": "tiny",
        "model": {"name": "model"},
        "data": {"source": "rows.jsonl", "validation": {"source": "held-out.jsonl"}},
        "search_space": {"learning_rate": [1e-3, 1e-2], "lora_rank": 4},
        "budget": {"steps": 20},
        "init_adapter": "adapter",
    }
    file, folder = tmp_path / "task.yaml", tmp_path / "task"
    file.write_text(yaml.safe_dump(content))
    folder.mkdir()
    record_inputs(load_task(file), folder, file)
    refuse_changes(folder)
    return {"content": content, "file": file, "folder": folder}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda c: c["search_space"].update(learning_rate=[1e-3, 2e-2]), "search_space.learning_rate"),
        (lambda c: c["search_space"].update(lora_rank=8), "search_space.lora_rank"),
        (lambda c: c["budget"].update(steps=21), "budget.steps"),
        (lambda c: c["data"].update(seed=1), "data.seed"),
        (lambda c: c.update(max_slots=2), "max_slots"),
        (lambda c: c.update(early_exit={"preset": "paper"}), "early_exit.preset"),
    ],
)
def test_a_changed_hyperparameter_is_refused_by_name(
    begun: dict[str, Any], change: Callable[[dict[str, Any]], None], field: str
) -> None:
    change(begun["content"])
    begun["file"].write_text(yaml.safe_dump(begun["content"]))
    with pytest.raises(TaskFileError) as refused:
        refuse_changes(begun["folder"])
    assert refused.value.field == field
    assert "as when the task began" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("rows.jsonl", "data.source"),
        ("held-out.jsonl", "data.validation.source"),
        ("adapter/adapter_config.json", "init_adapter"),
        ("model/config.json", "model.name"),
    ],
)
def test_a_changed_file_is_refused_by_the_field_that_names_it(begun: dict[str, Any], name: str, field: str) -> None:
    (begun["file"].parent / name).write_text(json.dumps({"text": "something else"}))
    with pytest.raises(TaskFileError) as refused:
        refuse_changes(begun["folder"])
    assert refused.value.field == field


def test_a_file_that_is_gone_changes_nothing(begun: dict[str, Any]) -> None:
    """Rows and task were kept when the task began."""
    for name in ("rows.jsonl", "task.yaml"):
        (begun["file"].parent / name).unlink()
    refuse_changes(begun["folder"])
