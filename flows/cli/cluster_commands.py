"""The commands of the cluster: hosts, the queue, the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.arguments import JSON_REQUESTED, Json, TaskFile, TaskId

commands = typer.Typer()


Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a field of the task, e.g. budget.epochs=2. Repeatable."),
]


@commands.command()
def up(
    host: Annotated[str | None, typer.Option("--host", help="Name of this host; its host name when left out.")] = None,
    gpus: Annotated[str | None, typer.Option("--gpus", help="GPUs to use, e.g. 0,1; all when left out.")] = None,
    mlflow_port: Annotated[int, typer.Option("--mlflow-port", min=1, max=65535, help="Port of MLflow's UI.")] = 5000,
    prefect_port: Annotated[int, typer.Option("--prefect-port", min=1, max=65535, help="Port of Prefect's UI.")] = 4200,
) -> None:
    """Run queued tasks on this machine's GPUs, with scheduler and servers, until Ctrl-C."""
    from flows.cli.up import run_up

    run_up(host=host, gpus=gpus, mlflow_port=mlflow_port, prefect_port=prefect_port)


@commands.command()
def submit(ctx: typer.Context, file: TaskFile, changes: Changes = None, as_json: Json = False) -> None:
    """Check a task file and put its task into the queue of the cluster."""
    from flows.cli.submit import run_submit

    ctx.meta[JSON_REQUESTED] = as_json
    run_submit(file, changes=changes or (), as_json=as_json)


@commands.command()
def clone(
    ctx: typer.Context,
    task: TaskId,
    changes: Changes = None,
    from_winner: Annotated[
        bool, typer.Option("--from-winner", help="Start every job from the adapter that won the task.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Put a copy of a task into the queue, with changed values, to repeat it or to go on from its winner."""
    from flows.cli.submit import run_clone

    ctx.meta[JSON_REQUESTED] = as_json
    run_clone(task, changes=changes or (), from_winner=from_winner, as_json=as_json)


@commands.command()
def queue(ctx: typer.Context, as_json: Json = False) -> None:
    """Show what runs, what waits and until when, and the hosts."""
    from flows.cli.queue import run_queue

    ctx.meta[JSON_REQUESTED] = as_json
    run_queue(as_json=as_json)


@commands.command()
def plan(
    ctx: typer.Context,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the chart there too, as .svg or .html.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan the queue as it is now and show the plan as a Gantt chart. Nothing is started."""
    from flows.cli.plan import run_plan

    ctx.meta[JSON_REQUESTED] = as_json
    run_plan(out=out, as_json=as_json)


@commands.command()
def pause(task: TaskId) -> None:
    """Take a task off its GPUs at a checkpoint, and keep it in the queue."""
    from alto_core.queue_states import StopRequest
    from flows.cli.stop import run_stop

    run_stop(task, StopRequest.PAUSE)


@commands.command()
def unpause(task: TaskId) -> None:
    """Let a paused task wait for GPUs again; it goes on from its checkpoint."""
    from flows.cli.stop import run_unpause

    run_unpause(task)


@commands.command()
def reconcile(ctx: typer.Context, as_json: Json = False) -> None:
    """Find dead runs, dead hosts and GPUs that they hold; put their tasks back into the queue."""
    from flows.cli.reconcile import run_reconcile

    ctx.meta[JSON_REQUESTED] = as_json
    run_reconcile(as_json=as_json)
