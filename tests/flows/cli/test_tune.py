"""`alto tune` around a stand-in for the flow: displays, JSON, errors, cancellation. A real flow is run elsewhere."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from alto_core.config import TuningTask
from alto_core.domain import JobBudget, JobState, Stage, TaskState
from alto_core.errors import DataError, EngineError
from alto_core.result import TaskResult
from alto_core.settings import Settings
from alto_core.store import EventDraft, JobUpdate, Store
from flows.cli import tune as tune_module
from flows.cli.view import Watcher

Invoke = Callable[..., Any]


@pytest.fixture
def task_file(tmp_path: Path, task: TuningTask) -> str:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')  # looked for before the task begins
    path = tmp_path / "task.yaml"
    path.write_text(yaml.safe_dump(task.model_dump(mode="json", exclude_none=True)))
    return str(path)


@pytest.fixture
def flow(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, task: TuningTask
) -> Callable[[Callable[[Store, str], None]], None]:
    """Puts a function in place of the flow; it gets the store and the id of a task that was created and started."""
    from alto_core.search_space import expand_search_space

    jobs = expand_search_space(task.search_space, ["q_proj"])
    budgets = {job.job_id: JobBudget(total_steps=40, warmup_steps=4, eval_steps=(4, 40)) for job in jobs}

    def install(body: Callable[[Store, str], None]) -> None:
        def tune(task: TuningTask, *, task_id: str, task_file: Path) -> None:
            print("a library that prints")
            store = Store(settings)
            store.add_task(task_id, task, jobs, budgets)
            store.start_task(task_id)
            store.set_stage(task_id, Stage.WARMUP)
            store.append_events(task_id, [EventDraft(kind="stage", text=Stage.WARMUP)])
            body(store, task_id)

        module = ModuleType("flows.tune")
        module.tune = tune  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flows.tune", module)

    return install


def _finish(store: Store, task_id: str) -> None:
    jobs = store.jobs(task_id)
    updates = [JobUpdate(job_id=job.job_id, state=JobState.FINISHED, step=40, best_val_loss=0.5) for job in jobs]
    store.update_jobs(task_id, updates)
    store.set_task_fields(task_id, result=TaskResult(winner=jobs[0].job_id, seconds=1.0).to_dict())
    store.end_task(task_id, TaskState.FINISHED)


def test_plain_output_has_events_then_the_outcome(invoke: Invoke, task_file: str, flow: Callable[..., None]) -> None:
    flow(_finish)
    result = invoke("tune", task_file)
    assert result.exit_code == 0, result.output
    assert result.stdout.index("stage warmup") < result.stdout.index("finished, winner")
    assert "alto report made-1" in result.stdout
    assert "alto ui" in result.stdout


def test_json_output_is_json_lines_and_ends_with_the_result(
    invoke: Invoke, task_file: str, flow: Callable[..., None]
) -> None:
    flow(_finish)
    result = invoke("tune", task_file, "--json")
    assert result.exit_code == 0
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["event"] for line in lines] == ["stage", "result"]
    assert lines[-1]["state"] == "finished"
    assert len(lines[-1]["leaderboard"]) == 4
    assert "a library that prints" in result.stderr


def test_two_runs_of_a_file_are_two_tasks(
    invoke: Invoke, task_file: str, flow: Callable[..., None], settings: Settings
) -> None:
    flow(_finish)
    for _ in range(2):
        assert invoke("tune", task_file, "--json").exit_code == 0
    assert [record.task_id for record in Store(settings).tasks()] == ["made-2", "made-1"]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_failed_task_shows_its_jobs_and_its_error(
    invoke: Invoke, task_file: str, flow: Callable[..., None], as_json: bool
) -> None:
    def fail(store: Store, task_id: str) -> None:
        store.end_task(task_id, TaskState.FAILED, "no memory")
        raise EngineError("no memory")

    flow(fail)
    result = invoke("tune", task_file, *(["--json"] if as_json else []))
    assert result.exit_code == 5
    assert "alto: no memory" in result.stderr
    if as_json:
        last = json.loads(result.stdout.splitlines()[-1])
        assert (last["event"], last["state"], last["message"]) == ("result", "failed", "no memory")
    else:
        assert result.stdout.count("lr0.001-") == 1


def test_a_bug_keeps_its_traceback_and_the_task_does_not_stay_open(
    invoke: Invoke, task_file: str, flow: Callable[..., None], settings: Settings
) -> None:
    def fail(store: Store, task_id: str) -> None:
        raise ZeroDivisionError("a bug")

    flow(fail)
    assert isinstance(invoke("tune", task_file).exception, ZeroDivisionError)
    record = Store(settings).task("made-1")
    assert (record.state, record.message) == (TaskState.FAILED, "ZeroDivisionError: a bug")


def test_a_task_that_never_began_has_only_its_error(
    invoke: Invoke, task_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune(task: TuningTask, *, task_id: str, task_file: Path) -> None:
        raise DataError("train.jsonl: no such file")

    module = ModuleType("flows.tune")
    module.tune = tune  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flows.tune", module)
    result = invoke("tune", task_file, "--json")
    assert result.exit_code == 3
    assert [json.loads(line)["event"] for line in result.stdout.splitlines()] == ["error"]
    assert "alto status" not in invoke("status").stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_task(
    invoke: Invoke, task_file: str, flow: Callable[..., None], settings: Settings, number: int
) -> None:
    def wait(store: Store, task_id: str) -> None:
        os.kill(os.getpid(), number)
        time.sleep(20)

    flow(wait)
    before = signal.getsignal(signal.SIGTERM)
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # what started the tests may ignore Ctrl-C
    try:
        result = invoke("tune", task_file)
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert result.exit_code == 130
    assert Store(settings).task("made-1").state is TaskState.CANCELLED
    assert {job.state for job in Store(settings).jobs("made-1")} == {JobState.CANCELLED}
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_live_picture_leaves_only_the_outcome_behind(settings: Settings, finished_task: str) -> None:
    from rich.console import Console

    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=150, height=30, color_system=None)
    display = tune_module.LiveDisplay(settings, console)
    watcher = Watcher(Store(settings), finished_task)
    display.show(watcher.look())
    drawn = stream.getvalue()
    assert "✓ register" in drawn
    display.show(watcher.look())
    display.finish(watcher.look())
    assert "finished, winner" in stream.getvalue()
    assert stream.getvalue().endswith("\n")
