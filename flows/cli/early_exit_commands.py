"""The commands about early exit: what jobs that ended early would have come to, and what they leave on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from alto_core.errors import TaskFileError
from flows.cli.arguments import JSON_REQUESTED, JobId, Json, TaskId

commands = typer.Typer()


@commands.command()
def revive(ctx: typer.Context, task: TaskId, job: JobId, as_json: Json = False) -> None:
    """Let a job that ended early go on to the end of its budget, and hold it against the winner."""
    from flows.cli.parked import run_revive

    ctx.meta[JSON_REQUESTED] = as_json
    run_revive(task, job, as_json=as_json)


@commands.command()
def audit(
    ctx: typer.Context,
    task: TaskId,
    share: Annotated[float, typer.Option("--share", help="Share of the exited jobs to run to the end.")] = 0.2,
    seed: Annotated[int, typer.Option("--seed", help="Draws the sample.")] = 0,
    as_json: Json = False,
) -> None:
    """Run a random sample of the jobs that ended early to the end, and report what early exit missed."""
    from flows.cli.parked import run_audit

    ctx.meta[JSON_REQUESTED] = as_json
    if not 0 < share <= 1:
        raise TaskFileError("--share", got=f"{share:g}", expected="a share in (0, 1]")
    run_audit(task, share=share, seed=seed, as_json=as_json)


@commands.command()
def curves(
    task: TaskId,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Curve file to write, ends in .parquet.")],
) -> None:
    """Write a task's curves from MLflow into a file that `alto replay` reads."""
    from flows.cli.replay import run_curves

    run_curves(task, file)


@commands.command()
def replay(
    ctx: typer.Context,
    curves: Annotated[Path, typer.Argument(metavar="CURVES", help="Curve file; see docs/early-exit.md.")],
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="Preset to replay, again for several. Default: guarded.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A constant of the policy, or gate_warmup_fraction. Values apart by commas make a grid.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what an early-exit policy would have saved and missed on recorded curves."""
    from flows.cli.replay import run_replay

    ctx.meta[JSON_REQUESTED] = as_json
    run_replay(curves, policies=policy or ["guarded"], settings=setting or [], as_json=as_json)


@commands.command()
def clean(
    ctx: typer.Context,
    task: Annotated[
        str | None, typer.Argument(metavar="[TASK]", help="Task id; all ended tasks when left out.")
    ] = None,
    older_than: Annotated[
        float, typer.Option("--older-than", metavar="DAYS", min=0, help="Free only states this old.")
    ] = 14,
    free: Annotated[bool, typer.Option("--free", help="Remove them; without this they are only listed.")] = False,
    as_json: Json = False,
) -> None:
    """Show the training states that ended tasks keep on disk, and free them. Adapters and curves stay."""
    from flows.cli.parked import run_clean

    ctx.meta[JSON_REQUESTED] = as_json
    run_clean(task, days=older_than, free=free, as_json=as_json)
