"""`alto`: the commands, their options, and how errors leave. What a command does stands in the module of its name.

Exit codes: 0 done, 1 an error without a class of its own, 2 task file or usage, 3 data, 4 model, 5 engine, 6 tracking,
7 store, 130 cancelled by Ctrl-C or SIGTERM. An exception that is no `AltoError` is a bug and keeps its traceback.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from alto_core.errors import AltoError
from flows.cli.interruption import CANCELLED_EXIT_CODE

JSON_REQUESTED = "alto.json"


class _AltoGroup(TyperGroup):
    """Turns an `AltoError` into one message and its exit code, the same under `main` and under a test runner."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AltoError as error:
            if ctx.meta.get(JSON_REQUESTED):
                content = {
                    "event": "error",
                    "kind": type(error).__name__,
                    "text": str(error),
                    "exit_code": error.exit_code,
                }
                print(json.dumps(content))
            print(f"alto: {error}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            raise typer.Exit(CANCELLED_EXIT_CODE) from None


app = typer.Typer(
    cls=_AltoGroup,
    name="alto",
    help="Finds the best LoRA adapter for a task: trains all candidates together, ends the hopeless ones early.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TaskFile = Annotated[Path, typer.Argument(metavar="FILE", help="Task file in YAML.")]
TaskId = Annotated[
    str, typer.Argument(metavar="TASK", help="Task id, for example quickstart-1; `alto status` lists them.")
]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout, for machines.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from alto_core.wording import alto_version

        typer.echo(f"alto {alto_version()}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Declares what stands before a command."""


@app.command()
def tune(
    ctx: typer.Context,
    file: TaskFile,
    as_json: Json = False,
    plain: Annotated[bool, typer.Option("--plain", help="One line per event, as when output is no terminal.")] = False,
    no_graph: Annotated[
        bool, typer.Option("--no-graph", help="On a GPU run operations one by one, for debugging: ALTO_CUDA_GRAPH=0.")
    ] = False,
) -> None:
    """Tune a task: train all its jobs, end the hopeless ones early, register the best adapter."""
    from flows.cli.tune import run_tune

    ctx.meta[JSON_REQUESTED] = as_json
    run_tune(file, as_json=as_json, plain=plain, cuda_graph=not no_graph)


@app.command()
def validate(ctx: typer.Context, file: TaskFile, as_json: Json = False) -> None:
    """Check a task file with its data and its model, without training, and say what it means."""
    from flows.cli.validate import run_validate

    ctx.meta[JSON_REQUESTED] = as_json
    run_validate(file, as_json=as_json)


@app.command()
def estimate(
    ctx: typer.Context,
    file: TaskFile,
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="KIND", help="A GPU that is not here, for example h100-80.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say how much memory and time a task will take, and what would make it fit, without training."""
    from flows.cli.estimate import run_estimate

    ctx.meta[JSON_REQUESTED] = as_json
    run_estimate(file, gpu=gpu, as_json=as_json)


@app.command()
def status(
    ctx: typer.Context,
    task: Annotated[str | None, typer.Argument(metavar="[TASK]", help="Task id; all tasks when left out.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay until the task has ended.")] = False,
    as_json: Json = False,
) -> None:
    """Show all tasks, or one task's jobs."""
    from flows.cli.status import run_status

    ctx.meta[JSON_REQUESTED] = as_json
    run_status(task, follow=follow, as_json=as_json)


@app.command()
def report(
    task: TaskId,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Where to write it.")] = None,
) -> None:
    """Write a task's report: one HTML file with curves, gate, leaderboard and savings."""
    from alto_core.report import build_report
    from alto_core.settings import load_settings

    typer.echo(str(build_report(task, load_settings(), out)))


@app.command()
def ui(
    mlflow_port: Annotated[int, typer.Option("--mlflow-port", min=1, max=65535, help="Port of MLflow's UI.")] = 5000,
    prefect_port: Annotated[int, typer.Option("--prefect-port", min=1, max=65535, help="Port of Prefect's UI.")] = 4200,
) -> None:
    """Start MLflow's and Prefect's UIs on this machine, until Ctrl-C."""
    from flows.cli.ui import run_ui

    run_ui(mlflow_port=mlflow_port, prefect_port=prefect_port)


@app.command()
def doctor(ctx: typer.Context, as_json: Json = False) -> None:
    """Say what is installed, which devices and services answer, and what is missing."""
    from flows.cli.doctor import run_doctor

    ctx.meta[JSON_REQUESTED] = as_json
    run_doctor(as_json=as_json)


def main() -> None:
    """Entry point of the console script."""
    app()
