"""The commands about this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.arguments import JSON_REQUESTED, Json

commands = typer.Typer()


@commands.command()
def ui(
    mlflow_port: Annotated[int, typer.Option("--mlflow-port", min=1, max=65535, help="Port of MLflow's UI.")] = 5000,
    prefect_port: Annotated[int, typer.Option("--prefect-port", min=1, max=65535, help="Port of Prefect's UI.")] = 4200,
) -> None:
    """Start MLflow's and Prefect's UIs on this machine, until Ctrl-C."""
    from flows.cli.ui import run_ui

    run_ui(mlflow_port=mlflow_port, prefect_port=prefect_port)


@commands.command()
def doctor(ctx: typer.Context, as_json: Json = False) -> None:
    """Say what is installed, which devices and services answer, and what is missing."""
    from flows.cli.doctor import run_doctor

    ctx.meta[JSON_REQUESTED] = as_json
    run_doctor(as_json=as_json)
