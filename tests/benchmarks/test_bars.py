"""The table of figures: one row per bar, replaced when measured again."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bars.py"


@pytest.fixture
def bars() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bars", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_bar_measured_again_replaces_its_row_and_leaves_the_others(bars: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "results" / "bars.csv"
    for name, value in (("b.second", 2.0), ("a.first", 1.0), ("b.second", 0.123456789)):
        bars.record_bar(name, value, target="<= 3", unit="s", packages=("torch",), command="make x, y", file=file)
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert file.read_text().splitlines()[0] == "bar,value,target,unit,gpu,versions,commit,date,command"
    assert [(row["bar"], row["value"]) for row in rows] == [("a.first", "1"), ("b.second", "0.123457")]
    assert all(row["command"] == "make x, y" and "torch 2." in row["versions"] and row["date"] for row in rows)
