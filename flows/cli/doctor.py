"""`alto doctor`: prints what `alto_core.doctor` found."""

from __future__ import annotations

import dataclasses

import typer
from rich.text import Text

from alto_core.doctor import Health, can_tune, examine
from alto_core.settings import load_settings, prepare_environment
from flows.cli.output import console_for, dump, stdout_for

SIGNS = {Health.OK: ("ok    ", "green"), Health.NOTE: ("note  ", "yellow"), Health.BROKEN: ("broken", "bold red")}


def run_doctor(*, as_json: bool) -> None:
    """Print every check. Exit code 0 when a tune would work here, else 1."""
    settings = load_settings()
    prepare_environment(settings)
    with stdout_for(as_json) as stream:
        checks = examine(settings)
        works = can_tune(checks)
        if as_json:
            content = {"event": "doctor", "ok": works, "checks": [dataclasses.asdict(check) for check in checks]}
            print(dump(content), file=stream)
        else:
            console = console_for(stream)
            for check in checks:
                console.print(Text.assemble(SIGNS[check.health], f"  {check.name:<14}", check.found), soft_wrap=True)
                if check.remedy:
                    console.print(Text(f"{'':<24}{check.remedy}", style="bold"), soft_wrap=True)
            verdict = ("A tune would work here.", "green") if works else ("A tune would fail here.", "bold red")
            console.print(Text.assemble(verdict))
    if not works:
        raise typer.Exit(1)
