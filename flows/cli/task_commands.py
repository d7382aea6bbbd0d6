"""The commands of one task: check it, tune it, watch it, read what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.arguments import JSON_REQUESTED, JobId, Json, TaskFile, TaskId

commands = typer.Typer()


@commands.command()
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


@commands.command()
def resume(
    ctx: typer.Context,
    task: TaskId,
    as_recorded: Annotated[
        bool, typer.Option("--as-recorded", help="Do not look whether the task file and its files have changed.")
    ] = False,
    as_json: Json = False,
    plain: Annotated[bool, typer.Option("--plain", help="One line per event, as when output is no terminal.")] = False,
) -> None:
    """Let a task that was killed, failed or was cancelled go on from its last checkpoint."""
    from flows.cli.resume import run_resume

    ctx.meta[JSON_REQUESTED] = as_json
    run_resume(task, as_recorded=as_recorded, as_json=as_json, plain=plain)


@commands.command()
def validate(ctx: typer.Context, file: TaskFile, as_json: Json = False) -> None:
    """Check a task file with its data and its model, without training, and say what it means."""
    from flows.cli.validate import run_validate

    ctx.meta[JSON_REQUESTED] = as_json
    run_validate(file, as_json=as_json)


@commands.command()
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


@commands.command()
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


@commands.command()
def report(
    task: TaskId,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Where to write it.")] = None,
) -> None:
    """Write a task's report: one HTML file with curves, gate, leaderboard and savings."""
    from alto_core.report import build_report
    from alto_core.settings import load_settings

    typer.echo(str(build_report(task, load_settings(), out)))


@commands.command()
def explain(
    ctx: typer.Context,
    task: TaskId,
    job: JobId,
    as_json: Json = False,
) -> None:
    """Say why a job stopped, with the numbers compared and its neighbours at that moment."""
    from flows.cli.explain import run_explain

    ctx.meta[JSON_REQUESTED] = as_json
    run_explain(task, job, as_json=as_json)


@commands.command()
def cancel(
    task: TaskId,
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="End this job alone, at the next evaluation; the others go on."),
    ] = None,
) -> None:
    """End a task of the queue, its GPUs free at once and its checkpoints kept; or one job of any task."""
    from alto_core.queue_states import StopRequest
    from flows.cli.stop import run_cancel_job, run_stop

    if job is not None:
        run_cancel_job(task, job)
    else:
        run_stop(task, StopRequest.CANCEL)
