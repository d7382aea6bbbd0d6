"""A stored data set comes back equal, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from alto_core.config import DataSection, ModelSection, SplitSection
from alto_core.data.prepare import prepare_data
from alto_core.data.rows import TaskData
from alto_core.data.storage import load_task_data, save_task_data
from alto_core.errors import DataError


@pytest.fixture
def task_data(write_lines: Callable[..., Path], model_folder: Callable[..., Path]) -> TaskData:
    rows = [{"prompt": f"é {i}", "completion": f"漢 {i}\n"} for i in range(12)]
    path = write_lines([*rows, {"prompt": "a", "completion": "\x1b"}, {"prompt": 1}, '{"a'])
    data = DataSection(source=str(path), test=SplitSection(rows=2))
    return prepare_data(data, ModelSection(name=str(model_folder("chatml"))))


def test_round_trip_is_exact_and_can_be_repeated(task_data: TaskData, tmp_path: Path) -> None:
    for _ in range(2):
        save_task_data(task_data, tmp_path / "data")
        assert load_task_data(tmp_path / "data") == task_data
    assert sorted(path.suffix for path in (tmp_path / "data").iterdir()) == [".json", ".parquet", ".parquet"]


@pytest.mark.parametrize("name", ["rows.parquet", "generation_rows.parquet", "task_data.json"])
def test_missing_or_cut_file_is_refused(task_data: TaskData, tmp_path: Path, name: str) -> None:
    save_task_data(task_data, tmp_path)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="cannot be read"):
        load_task_data(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match="cannot be read"):
        load_task_data(tmp_path)


def test_changed_row_and_other_layout_are_refused(task_data: TaskData, tmp_path: Path) -> None:
    save_task_data(task_data, tmp_path)
    table = pq.read_table(tmp_path / "rows.parquet")
    pq.write_table(table.slice(1), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="digest"):
        load_task_data(tmp_path)
    summary = json.loads((tmp_path / "task_data.json").read_text())
    (tmp_path / "task_data.json").write_text(json.dumps({**summary, "layout_version": 99}))
    with pytest.raises(DataError, match="layout 99, expected 1"):
        load_task_data(tmp_path)
