"""`alto promote` and `alto rollback`: which version of a registered model serves."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from alto_core.loading import loading
from alto_core.settings import load_settings, prepare_environment
from flows.cli.output import busy, console_for, dump, stdout_for

if TYPE_CHECKING:
    from alto_core.promotion import Decision


def run_promote(name: str, *, margin: float, accept_other_rows: bool, as_json: bool) -> None:
    """Compare challenger and champion, move the alias where the challenger is better, say why."""
    settings = load_settings()
    prepare_environment(settings)
    with stdout_for(as_json) as stream:
        with busy("both adapters answer the held-out rows"):
            with loading():  # here, since it imports torch and MLflow
                from alto_core.promotion import promote

            decision = promote(name, settings, margin=margin, accept_other_rows=accept_other_rows)
        _show(decision, console_for(stream), as_json=as_json)


def run_rollback(name: str, *, as_json: bool) -> None:
    """Make the champion before the present one champion again."""
    settings = load_settings()
    prepare_environment(settings)
    with stdout_for(as_json) as stream:
        with loading():
            from alto_core.promotion import roll_back

        _show(roll_back(name, settings), console_for(stream), as_json=as_json)


def _show(decision: Decision, console: Console, *, as_json: bool) -> None:
    if as_json:
        content = {"event": "promotion", **dataclasses.asdict(decision), "changed": decision.changed}
        console.print(dump(content), markup=False, soft_wrap=True)
        return
    serves = f"version {decision.champion} serves" if decision.champion else "no version serves"
    head = Text.assemble((f"{decision.name}: ", ""), (serves, "bold green" if decision.changed else "bold"))
    console.print(head.append("" if decision.changed else ", as before"), soft_wrap=True)
    console.print(Text(f"  version {decision.version}: {decision.judgement.reason}"), soft_wrap=True)
