"""How stages are kept: by name and arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect import flow

from tasks.stage import stage

pytestmark = pytest.mark.usefixtures("prefect_server")


def test_stages_with_equal_arguments_keep_their_own_results(tmp_path: Path) -> None:
    calls = []

    @stage("first")
    def first(task_id: str, revision: str) -> list[str]:
        calls.append("first")
        return ["a"]

    @stage("second")
    def second(task_id: str, revision: str) -> str:
        calls.append("second")
        return "b"

    @flow(name="two stages")
    def both(revision: str) -> tuple[list[str], str]:
        return first("task-1", revision), second("task-1", revision)

    revision = str(tmp_path)
    assert both(revision) == (["a"], "b")
    assert both(revision) == (["a"], "b")
    assert calls == ["first", "second"], "the second run takes what the first kept"
    both(f"{revision}-changed")
    assert calls == ["first", "second"] * 2
