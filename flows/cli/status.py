"""`alto status`: all tasks in a table, one task's jobs, or one task followed to its end."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime

from rich.console import Console
from rich.text import Text

from alto_core import wording
from alto_core.cluster.dead_tasks import end_dead_tasks
from alto_core.settings import Settings, load_settings
from alto_core.store import Store, TaskRecord
from flows.cli.live_view import MEDIUM, TASK_STYLES, render_view
from flows.cli.outcome import outcome_object, print_outcome
from flows.cli.output import console_for, dump
from flows.cli.queue import place_in_queue
from flows.cli.tables import bare_table
from flows.cli.tune import POLL_SECONDS, make_display
from flows.cli.view import Watcher

MAX_TASKS = 50


def run_status(task_id: str | None, *, follow: bool, as_json: bool) -> None:
    """Print and return; with `follow` return when the task, by default the latest, has ended."""
    settings = load_settings()
    end_dead_tasks(settings)
    store = Store(settings)
    console = console_for()
    if task_id is None and not follow:
        _print_tasks(store.tasks(limit=MAX_TASKS), console, as_json=as_json)
        return
    if task_id is None:
        latest = store.tasks(limit=1)
        if not latest:
            _print_tasks((), console, as_json=as_json)
            return
        task_id = latest[0].task_id
    store.task(task_id)
    watcher = Watcher(store, task_id)
    if not follow:
        view = watcher.look()
        if as_json:
            print(dump({**outcome_object(view, settings), "event": "status", "stage": view.stage}))
        elif view.state.is_end:
            print_outcome(view, settings, console)
        else:
            console.print(render_view(view, width=console.size.width, height=None))
            _print_place(task_id, settings, console)
        return
    if not as_json:
        _print_place(task_id, settings, console)
    display = make_display(settings, sys.stdout, as_json=as_json, plain=False)
    view = watcher.look()
    while not view.state.is_end:
        display.show(view)
        time.sleep(POLL_SECONDS)
        view = watcher.look()
    display.show(view)
    display.finish(view)


def _print_place(task_id: str, settings: Settings, console: Console) -> None:
    """What a task of the queue waits for, or where it runs."""
    if place := place_in_queue(task_id, settings):
        console.print(Text(place, style="dim"), soft_wrap=True)


def _print_tasks(tasks: tuple[TaskRecord, ...], console: Console, *, as_json: bool) -> None:
    """The newest first."""
    if as_json:
        for record in tasks:
            print(dump({"event": "task", **_task_object(record)}))
        return
    if not tasks:
        console.print("No tasks yet. `alto tune FILE` starts one.")
        return
    table = bare_table()
    is_narrow = console.width < MEDIUM
    for name in ("task", "state", "started (UTC)", "took", "winner", *(() if is_narrow else ("owner", "stage"))):
        table.add_column(name, no_wrap=name not in ("task", "winner"), overflow="fold")
    for record in tasks:
        row = _task_object(record)
        more = () if is_narrow else (Text(record.owner), Text(str(record.stage or wording.NOTHING)))
        table.add_row(
            Text(record.task_id),
            Text(str(record.state), style=TASK_STYLES.get(record.state, "cyan")),
            Text(f"{record.started_at:%Y-%m-%d %H:%M}" if record.started_at else wording.NOTHING),
            Text(wording.duration(row["seconds"])),
            Text(record.winner_job_id or wording.NOTHING),
            *more,
        )
    console.print(table)


def _task_object(record: TaskRecord) -> dict:
    seconds = (
        ((record.ended_at or datetime.now(UTC)) - record.started_at).total_seconds() if record.started_at else None
    )
    return {
        "task_id": record.task_id,
        "owner": record.owner,
        "state": str(record.state),
        "stage": record.stage,
        "created": record.created_at,
        "started": record.started_at,
        "ended": record.ended_at,
        "seconds": seconds,
        "winner": record.winner_job_id,
        "message": record.message,
    }
