"""The commands of the model registry: which adapter serves, and how it gets out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.arguments import JSON_REQUESTED, Json

commands = typer.Typer()


@commands.command()
def promote(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Registered model.")],
    margin: Annotated[
        float, typer.Option("--margin", min=0.0, help="How much better, beyond the 95 % interval, it must be.")
    ] = 0.0,
    accept_other_rows: Annotated[
        bool, typer.Option("--accept-other-rows", help="Compare even where the champion was held out other rows.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare the challenger with the champion on the same held-out rows; the better one serves."""
    from flows.cli.promote import run_promote

    ctx.meta[JSON_REQUESTED] = as_json
    run_promote(name, margin=margin, accept_other_rows=accept_other_rows, as_json=as_json)


@commands.command()
def rollback(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Registered model.")],
    as_json: Json = False,
) -> None:
    """Let the version serve that was champion before the last promotion."""
    from flows.cli.promote import run_rollback

    ctx.meta[JSON_REQUESTED] = as_json
    run_rollback(name, as_json=as_json)


@commands.command()
def export(
    ctx: typer.Context,
    reference: Annotated[
        str, typer.Argument(metavar="NAME[@ALIAS]", help="Registered model: name@alias, name/version, or its champion.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder to write.")],
    merged: Annotated[bool, typer.Option("--merged", help="Also write DIR/merged, the whole model.")] = False,
    padded: Annotated[
        bool, typer.Option("--pad-rank", help="Fill the rank up with zeros to the next limit that vLLM has.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a registered adapter as a PEFT folder, checked, with a card."""
    from flows.cli.export import run_export

    ctx.meta[JSON_REQUESTED] = as_json
    run_export(reference, folder, merged=merged, padded=padded, as_json=as_json)
