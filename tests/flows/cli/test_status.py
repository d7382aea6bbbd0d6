"""`alto status` and `alto report` over a real store."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flows.cli.output
from alto_core.domain import TaskState
from alto_core.settings import Settings
from alto_core.store import EventDraft, Store

Invoke = Callable[..., Any]
REPOSITORY = Path(__file__).resolve().parents[3]


def test_no_tasks_yet(invoke: Invoke) -> None:
    result = invoke("status")
    assert result.exit_code == 0
    assert "alto tune FILE" in result.stdout
    assert invoke("status", "--json").stdout == ""


def test_all_tasks(invoke: Invoke, finished_task: str) -> None:
    result = invoke("status")
    assert result.exit_code == 0
    assert finished_task in result.stdout
    assert "finished" in result.stdout
    (line,) = invoke("status", "--json").stdout.splitlines()
    content = json.loads(line)
    assert content["task_id"] == finished_task
    assert content["state"] == "finished"
    assert content["winner"].startswith("lr0.001-")


@pytest.mark.parametrize("columns", [80, 100, None], ids=["80 columns", "100 columns", "pipe"])
def test_no_terminal_and_no_pipe_cuts_an_id(
    invoke: Invoke, finished_task: str, monkeypatch: pytest.MonkeyPatch, columns: int | None
) -> None:
    if columns is not None:
        monkeypatch.setattr(flows.cli.output, "PIPE_WIDTH", columns)
    for arguments in (["status"], ["status", finished_task]):
        output = invoke(*arguments).stdout
        assert "lr0.001-r8-b8-" in output and "…" not in output, output
        assert max(map(len, output.splitlines()[:3])) <= (columns or 140)
    (line,) = [line for line in output.splitlines() if "alto export" in line]
    assert "alto export made/1 FOLDER" in line


def test_what_only_reads_a_task_starts_without_torch() -> None:
    code = "import sys, flows.cli.explain, flows.cli.status; print({'torch', 'prefect'} & {*sys.modules})"
    shown = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"


def test_a_task_that_has_finished_is_not_resumed(invoke: Invoke, settings: Settings, finished_task: str) -> None:
    Store(settings).set_task_fields(finished_task, report_path="report.html")
    result = invoke("resume", finished_task)
    assert result.exit_code == 7
    assert result.stderr == f"alto: task {finished_task} has finished, expected one with something left to do.\n"
    assert result.stdout == "", "the outcome is what `alto status` shows"


def test_an_unknown_task_is_told_with_exit_code_7(invoke: Invoke, finished_task: str) -> None:
    for arguments in (["status", "mad-1"], ["report", "mad-1"], ["status", "mad-1", "--follow"]):
        result = invoke(*arguments)
        assert result.exit_code == 7, arguments
        assert "mad-1" in result.stderr


def test_a_running_task_shows_its_jobs(invoke: Invoke, running_task: str) -> None:
    output = invoke("status", running_task).stdout
    assert "● warmup" in output
    assert "✓ profile" in output
    assert "○ register" in output
    assert "187 tokens/s" in output
    for text in ("lr0.001-r8-b8-", "running", "waiting", "diverging", "3/40", "the [red]train[/red] loss is nan"):
        assert text in output, text
    assert "a kind that nobody knows" in output


def test_a_finished_task_shows_its_outcome(invoke: Invoke, finished_task: str) -> None:
    output = invoke("status", finished_task).stdout
    for text in (
        "finished, winner",
        "exact match 0.925 [0.885, 0.965]",
        "exact match 0.000 [0.000, 0.040]",
        "5 min 18 s",
        "1.2 %",
        "made version 1 (champion)",
        f"alto report {finished_task}",
        "alto ui",
        "/adapter",
    ):
        assert text in output, text
    assert output.index("lr0.001-") < output.index("lr0.002-") < output.index("lr0.0001-") < output.index("lr0.02-")


def test_json_of_one_task_is_strict(invoke: Invoke, finished_task: str) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    content = json.loads(invoke("status", finished_task, "--json").stdout, parse_constant=refuse)
    assert content["event"] == "status"
    assert [line["state"] for line in content["leaderboard"]] == [
        "finished",
        "overfitting",
        "underperforming",
        "diverging",
    ]
    # saved: 36 of 40 steps, 16 of 40, 37 of 40, each of 8 rows
    assert content["samples_saved_share"] == pytest.approx((16 + 36 + 37) / 160)
    assert content["registered"] == {"name": "made", "version": 1, "aliases": ["champion"]}


def test_following_prints_each_event_once_and_returns_at_the_end(
    invoke: Invoke, settings: Settings, running_task: str
) -> None:
    def finish() -> None:
        time.sleep(0.8)
        store = Store(settings)
        store.append_events(running_task, [EventDraft(kind="warning", text="something late")])
        store.end_task(running_task, TaskState.FAILED, "the reason")

    thread = threading.Thread(target=finish)
    thread.start()
    result = invoke("status", "--follow")
    thread.join()
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert sum("stage warmup" in line for line in lines) == 1
    assert sum("evaluated 3 jobs, best lr0.002" in line for line in lines) == 1
    assert sum("warning: something late" in line for line in lines) == 1
    assert any("ended at step 3 of 40, diverging: the [red]train[/red] loss is nan" in line for line in lines)
    assert any("failed" in line and "the reason" in line for line in lines)


def test_following_as_json_ends_with_the_result(invoke: Invoke, finished_task: str) -> None:
    lines = [json.loads(line) for line in invoke("status", finished_task, "--follow", "--json").stdout.splitlines()]
    assert [line["event"] for line in lines].count("evaluation") == 3
    assert (
        next(line for line in lines if line["event"] == "evaluation" and "lr0.02-" in line["job_id"])["numbers"][
            "val_loss"
        ]
        is None
    )
    assert lines[-1]["event"] == "result"
    assert lines[-1]["winner"].startswith("lr0.001-")


def test_a_report_is_written_without_curves_too(invoke: Invoke, finished_task: str, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "report.html"
    result = invoke("report", finished_task, "--out", str(out))
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(out)
    page = out.read_text(encoding="utf-8")
    assert page.count("lr0.02-r8-b8-") >= 1
    assert "the [red]train[/red] loss is nan" in page
    assert "steps: 40" in page
    assert list(out.parent.iterdir()) == [out]
