"""The tests' tiny model and 64 rows that it can learn, for scripts whose question is not how good a model gets."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

CONFTEST = Path(__file__).resolve().parents[1] / "tests" / "conftest.py"


def write_tiny_model(folder: Path) -> Path:
    """A two-layer Llama with random weights and a tokenizer of single bytes."""
    spec = importlib.util.spec_from_file_location("tests_conftest", CONFTEST)
    assert spec and spec.loader
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    tests.make_tiny_model(folder)
    return folder


def write_tiny_inputs(folder: Path) -> tuple[Path, Path]:
    """The model's folder and the file of rows, both in this folder."""
    file = folder / "rows.jsonl"
    rows = [{"prompt": f"{chr(97 + i % 26)}{i // 26}:", "completion": chr(97 + i % 26) * 3} for i in range(64)]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return write_tiny_model(folder / "model"), file
