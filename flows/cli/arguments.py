"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JSON_REQUESTED = "alto.json"
"""In a context: the command answers, and fails, in JSON."""

TaskFile = Annotated[Path, typer.Argument(metavar="FILE", help="Task file in YAML.")]
TaskId = Annotated[
    str, typer.Argument(metavar="TASK", help="Task id, for example quickstart-1; `alto status` lists them.")
]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Job id, or the beginning of one.")]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout, for machines.")]
