"""`alto`: the commands put together, and how errors leave.

Each module `*_commands` names some commands with their options; what a command does stands in the module of its name.

Exit codes: 0 done, 1 an error without a class of its own, 2 task file or usage, 3 data, 4 model, 5 engine, 6 tracking,
7 store, 8 someone else's, 130 cancelled by Ctrl-C or SIGTERM. An exception that is no `AltoError` is a bug and keeps
its traceback.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from alto_core.errors import AltoError
from alto_core.loading import keep_what_is_loaded
from flows.cli import cluster_commands, early_exit_commands, machine_commands, registry_commands, task_commands
from flows.cli.arguments import JSON_REQUESTED
from flows.cli.interruption import CANCELLED_EXIT_CODE


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


PANELS = {
    "Tasks": task_commands,
    "Early exit": early_exit_commands,
    "Registry": registry_commands,
    "Cluster": cluster_commands,
    "This machine": machine_commands,
}
for panel, part in PANELS.items():
    for command in part.commands.registered_commands:
        command.rich_help_panel = panel
    app.add_typer(part.commands)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    finally:
        keep_what_is_loaded()
