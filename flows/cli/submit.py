"""`alto submit` and `alto clone`: a task goes into the queue of the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from alto_core import wording
from alto_core.config import TuningTask, with_changes
from alto_core.errors import StoreError
from alto_core.first_look import read_task
from alto_core.loading import loading
from alto_core.ownership import UNNAMED
from alto_core.queue_states import Priority
from alto_core.result import TaskResult
from alto_core.settings import Settings, load_settings, prepare_environment
from alto_core.store import Demand, Fleet, HostRecord, Queue, Store
from flows.cli.identity import who
from flows.cli.output import busy, console_for, dump, stdout_for


def run_submit(file: Path, *, changes: Sequence[str], as_json: bool) -> str:
    """Check and record the task of a file, and put it into the queue. Returns its id."""
    return _submit(with_changes(read_task(file), changes), as_json=as_json)


def run_clone(task_id: str, *, changes: Sequence[str], from_winner: bool, as_json: bool) -> None:
    """Put a copy of a task into the queue, with changed values, or starting from its winner's adapter.

    Where MLflow asks for a login, the copy belongs to who clones.

    Raises:
        StoreError: there is no such task, or it has no winner to start from.
    """
    settings = load_settings()
    prepare_environment(settings)
    record = Store(settings).task(task_id)
    changes = list(changes)
    if from_winner:
        folder = TaskResult.from_dict(record.result or {}).adapter_folder
        if folder is None:
            raise StoreError(f"task {task_id} is {record.state}, expected one that has registered a winner")
        changes.insert(0, f"init_adapter={folder}")
    task = record.task
    if who(settings).name is not None:
        task = task.model_copy(update={"owner": UNNAMED})
    _submit(with_changes(task, changes), as_json=as_json)


def _submit(task: TuningTask, *, as_json: bool) -> str:
    settings = load_settings()
    prepare_environment(settings)
    hosts = _hosts(settings)
    with stdout_for(as_json) as stream:
        with busy("reading the rows and the model's structure"):
            task_id, num_jobs, demand, is_known = _put_into_queue(task, hosts, settings)
        _announce(settings, task_id)
        if as_json:
            content = {"event": "submitted", "task_id": task_id, "num_jobs": num_jobs, **vars(demand)}
            print(dump(content), file=stream)
            return task_id
        console = console_for(stream)
        takes = wording.duration(demand.expected_seconds)
        console.print(
            f"{task_id}: {wording.plural(num_jobs, 'job')}, {wording.plural(demand.num_gpus, 'GPU')}, "
            f"{demand.priority}, "
            + (f"expected to take {takes} at most" if is_known else f"planned as {takes}: this model has not run yet"),
            markup=False,
            soft_wrap=True,
        )
        if not hosts:
            console.print("  It waits until a host is there: `alto up` starts one.", style="yellow")
        console.print(f"  alto status {task_id} --follow   alto queue   alto plan", markup=False, style="dim")
        return task_id


def _put_into_queue(task: TuningTask, hosts: Sequence[HostRecord], settings: Settings) -> tuple[str, int, Demand, bool]:
    """The task's id, how many jobs it has, what it asks for, and whether anything is known of the time it takes."""
    with loading():  # here, because it takes torch and transformers; a wrong field is told before that
        from alto_core.cluster.expectation import UNKNOWN_SECONDS, known_seconds
        from alto_core.estimation import gpus_needed
        from alto_core.preparation import create_task, plan_task

    plan = plan_task(task)
    store = Store(settings)
    gpu_bytes, most = _largest(hosts)
    num_gpus = gpus_needed(plan, gpu_bytes=gpu_bytes, most=most)
    seconds = known_seconds(task, plan.num_tokens, store)
    demand = _demand(task, num_gpus, UNKNOWN_SECONDS if seconds is None else seconds)
    task_id = store.new_task_id(task.name)
    create_task(plan, task_id, settings)
    Queue(settings).submit(task_id, demand)
    return task_id, len(plan.jobs), demand, seconds is not None


def _hosts(settings: Settings) -> tuple[HostRecord, ...]:
    """Those that are there."""
    fleet = Fleet(settings)
    try:
        return tuple(host for host in fleet.hosts() if not host.is_lost)
    finally:
        fleet.close()


def _largest(hosts: Sequence[HostRecord]) -> tuple[int, int]:
    """Memory of each GPU and their number, of the host with most memory in all; without hosts nothing is known."""
    sizes = [(host.gpu_bytes, len(host.holders)) for host in hosts]
    return max(sizes, key=lambda size: size[0] * size[1], default=(2**63, 1))


def _demand(task: TuningTask, num_gpus: int, seconds: float) -> Demand:
    cluster = task.cluster
    return Demand(
        num_gpus=num_gpus,
        expected_seconds=seconds,
        priority=Priority(cluster.priority),
        deadline=None if cluster.deadline is None else datetime.fromisoformat(cluster.deadline),
        min_gpu_bytes=round(cluster.min_gpu_gib * 2**30),
    )


def _announce(settings: Settings, task_id: str) -> None:
    """Wake the deployment `schedule`. A waiting scheduler sees the queue itself, without a server of Prefect."""
    if settings.prefect_api_url is None:
        return
    from prefect.events import emit_event

    emit_event("alto.task.submitted", resource={"prefect.resource.id": f"alto.task.{task_id}"})
