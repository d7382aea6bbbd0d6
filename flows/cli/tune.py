"""`alto tune`: run a task in this process and show it while it runs.

Training has the main thread, where signals arrive; a second thread reads the store twice a second and draws.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Protocol

import typer
from rich.console import Console
from rich.live import Live

from alto_core.cluster.dead_tasks import end_dead_tasks
from alto_core.domain import TaskState
from alto_core.errors import AltoError
from alto_core.first_look import read_task
from alto_core.loading import loading
from alto_core.settings import Settings, load_settings, prepare_environment
from alto_core.store import Store
from flows.cli.interruption import CANCELLED_EXIT_CODE, sigterm_as_ctrl_c
from flows.cli.lines import json_line, plain_lines
from flows.cli.live_view import render_head, render_view
from flows.cli.outcome import outcome_object, print_outcome
from flows.cli.output import console_for, dump, stdout_for
from flows.cli.view import TaskView, Watcher

POLL_SECONDS = 0.5


class Display(Protocol):
    """Shows a task's moments one after another, then its end."""

    def show(self, view: TaskView) -> None: ...

    def finish(self, view: TaskView) -> None: ...


def run_tune(file: Path, *, as_json: bool, plain: bool, cuda_graph: bool = True) -> None:
    """Tune the task of a file. Ctrl-C or SIGTERM cancels it: states are recorded, then the exit code is 130."""
    if not cuda_graph:
        # The stages read their settings themselves.
        os.environ["ALTO_CUDA_GRAPH"] = "0"
    settings = quiet_settings()
    task = read_task(file)
    store = Store(settings)
    task_id = store.new_task_id(task.name)

    def run() -> None:
        with loading():
            from flows.embedded_server import begin_embedded_server

            begin_embedded_server()  # it comes up while torch is imported and the data prepared
            from flows.reconcile import tell_prefect
            from flows.tune import tune

        with _ended(store, task_id):
            tell_prefect(end_dead_tasks(settings))
            tune(task, task_id=task_id, task_file=file)

    run_shown(run, Watcher(store, task_id), settings, as_json=as_json, plain=plain)


def quiet_settings() -> Settings:
    """Settings, and an environment in which libraries keep quiet: their log lines would tear the display apart."""
    settings = load_settings()
    prepare_environment(settings)
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    for runs in ("prefect.flow_runs", "prefect.task_runs"):
        # How a run ended the command says itself; Prefect, which calls Ctrl-C a crash, keeps its words for its own UI.
        logging.getLogger(runs).propagate = False
    return settings


def run_shown(run: Callable[[], None], watcher: Watcher, settings: Settings, *, as_json: bool, plain: bool) -> None:
    """Run a task in this thread and show it meanwhile. Ctrl-C and SIGTERM become exit code 130."""
    with stdout_for(as_json) as stream, sigterm_as_ctrl_c():
        display = make_display(settings, stream, as_json=as_json, plain=plain)
        try:
            with _watched(watcher, display):
                run()
        except KeyboardInterrupt:
            raise typer.Exit(CANCELLED_EXIT_CODE) from None
        except AltoError as error:
            if not as_json or not watcher.store.has_task(watcher.task_id):
                raise
            # the result object, which tells of the failure, stays the last thing on stdout
            print(f"alto: {error}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from None


def make_display(settings: Settings, stream: IO[str], *, as_json: bool, plain: bool) -> Display:
    """JSON lines, a live picture on a terminal, or plain lines."""
    if as_json:
        return JsonDisplay(settings, stream)
    console = console_for(stream)
    return LiveDisplay(settings, console) if console.is_terminal and not plain else PlainDisplay(settings, console)


class JsonDisplay:
    """One JSON object per event, and the result as the last one."""

    def __init__(self, settings: Settings, stream: IO[str]):
        self._settings, self._stream = settings, stream

    def show(self, view: TaskView) -> None:
        for event in view.new_events:
            print(json_line(event), file=self._stream, flush=True)

    def finish(self, view: TaskView) -> None:
        if view.record is not None:
            print(dump(outcome_object(view, self._settings)), file=self._stream, flush=True)


class PlainDisplay:
    """One line per event, for files and pipes."""

    def __init__(self, settings: Settings, console: Console):
        self._settings, self._console = settings, console
        self._greeted = False

    def show(self, view: TaskView) -> None:
        if not self._greeted:
            self._console.print(f"task {view.task_id}: {view.state_word}", markup=False)
            self._greeted = True
        if view.record is None:
            return
        started = view.record.started_at or view.record.created_at
        for line in plain_lines(view.new_events, view.jobs, started):
            self._console.print(line, markup=False, soft_wrap=True)

    def finish(self, view: TaskView) -> None:
        print_outcome(view, self._settings, self._console)


class LiveDisplay:
    """A picture of the task that is redrawn in place."""

    def __init__(self, settings: Settings, console: Console):
        self._settings, self._console = settings, console
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def show(self, view: TaskView) -> None:
        if not self._live.is_started:
            self._live.start()
        size = self._console.size
        self._live.update(render_view(view, width=size.width, height=size.height), refresh=True)

    def finish(self, view: TaskView) -> None:
        self._live.stop()
        self._console.print(render_head(view))
        print_outcome(view, self._settings, self._console)


@contextlib.contextmanager
def _watched(watcher: Watcher, display: Display) -> Iterator[None]:
    """Show the task while the block runs; when it ends, whatever ended it, show the rest and the outcome."""
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            display.show(watcher.look())
            done.wait(POLL_SECONDS)

    thread = threading.Thread(target=watch, name="alto-display", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        last = watcher.look()
        display.show(last)
        display.finish(last)


@contextlib.contextmanager
def _ended(store: Store, task_id: str) -> Iterator[None]:
    """A task whose block was left before its flow began has nobody else to record its end."""
    try:
        yield
    except BaseException as error:
        state = TaskState.FAILED if isinstance(error, Exception) else TaskState.CANCELLED
        message = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else "cancelled before it began"
        if store.has_task(task_id) and not store.task(task_id).state.is_end:
            store.end_task(task_id, state, message)
        raise
