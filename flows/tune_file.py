"""A task file on a worker: checked, made into a task and tuned; what the deployment `tune` runs."""

from __future__ import annotations

# flows.tune prepares the environment that libraries read when they are imported, so it comes first
# isort: off
from flows.tune import TuneResult, tune, tune_result
from flows.resume import resume
# isort: on

from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from alto_core.config import load_task
from alto_core.domain import TaskState
from alto_core.settings import load_settings
from alto_core.store import Store


@flow(name="tune file", flow_run_name="tune {task_file}")
def tune_file(task_file: str) -> str:
    """Check a task file, create its task and tune it: what the deployment `tune` runs. A retry goes on with the task.

    Args:
        task_file: path on the machine of the worker.

    Returns:
        `name/version` of the registered adapter.
    """
    store = Store(load_settings())
    note = load_settings().home / "flow-runs" / str(flow_run.id)
    if note.is_file() and store.has_task(note.read_text(encoding="utf-8")):
        result = _finished(note.read_text(encoding="utf-8"))
    else:
        task = load_task(task_file)
        task_id = store.new_task_id(task.name)
        note.parent.mkdir(exist_ok=True)
        note.write_text(task_id, encoding="utf-8")
        result = tune(task, task_id=task_id, task_file=Path(task_file))
    return f"{result.registered.name}/{result.registered.version}"


def _finished(task_id: str) -> TuneResult:
    state = Store(load_settings()).task(task_id).state
    return tune_result(task_id) if state is TaskState.FINISHED else resume(task_id)
