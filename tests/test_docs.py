"""The pages that are made from the code are current."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_task_file_reference_names_every_field_as_the_code_has_it() -> None:
    script = DOCS / "make_task_file_reference.py"
    spec = importlib.util.spec_from_file_location("make_task_file_reference", script)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "task-file.md").read_text(encoding="utf-8") == module.reference(), f"run: python docs/{script.name}"
