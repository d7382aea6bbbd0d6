"""Every command that the documentation shows is one, with these options; test_snippets.py runs those that can run here.

Each program's own parser reads the words, and nothing is run: `alto` (typer), `make --dry-run`, the scripts (argparse),
`pip`, `hf`, `mlflow` and `prefect`.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import io
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from alto_core import settings
from flows.cli.app import app
from tests.pages import PAGES, REPOSITORY, Command, commands

WRITTEN = tuple(commands())
NOT_OURS = {"curl", "docker"}
"""Not installed with ALTO. Of what they name, the files are looked for."""
SHELL = {"export"}


def called(program: str) -> list[Command]:
    return [command for command in WRITTEN if re.sub(r"^\.venv/bin/|^python -m ", "", command.words[0]) == program]


def refused(programs: Sequence[Command], refusal: Callable[[Command], str | None]) -> list[str]:
    """What a parser says of those that it does not take."""
    return [f"{command}: {text}" for command in programs if (text := refusal(command)) is not None]


def refusal_of_click(group: Any, words: Sequence[str]) -> str | None:
    """Of a command line below this group, which may have groups of its own."""
    name, *rest = words
    if name not in group.commands:
        return f"no command {name!r}"
    command = group.commands[name]
    if hasattr(command, "commands"):
        return refusal_of_click(command, rest)
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        try:
            command.make_context(name, rest).close()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return None


def test_programs_that_are_shown_are_parsed_here() -> None:
    """A page that names another one needs a check of its own, or a reason to have none."""
    parsed = {"alto", "make", "python", "pip", "hf", "mlflow", "prefect", "sh"}
    assert {command.words[0].removeprefix(".venv/bin/") for command in WRITTEN} - parsed - SHELL == NOT_OURS


def test_alto() -> None:
    group: Any = typer.main.get_command(app)

    def refusal(command: Command) -> str | None:
        _, name, *rest = command.words
        if name.startswith("-") or name.isupper():  # `alto --help`, `alto COMMAND --help`
            return None
        if not command.is_spoken:
            return refusal_of_click(group, [name, *rest])
        if name not in group.commands:
            return "no such command"
        known = {option for parameter in group.commands[name].params for option in parameter.opts} | {"--help", "-h"}
        unknown = {word.partition("=")[0] for word in rest if word.startswith("-")} - known
        return f"no {sorted(unknown)}" if unknown else None

    shown = called("alto")
    assert len(shown) > 100
    assert refused(shown, refusal) == []


def test_make() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")

    def refusal(command: Command) -> str | None:
        done = subprocess.run(
            ["make", "--dry-run", "--no-print-directory", f"PYTHON={sys.executable}", *command.words[1:]],
            cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        variables = {word.partition("=")[0] for word in command.words if "=" in word}
        unknown = sorted(variables - set(re.findall(r"\w+", makefile)))
        return done.stderr if done.returncode else f"no variables {unknown}" if unknown else None

    shown = called("make")
    assert len(shown) > 10
    assert refused(shown, refusal) == []


def script_commands() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Where it stands, and its words: in pages, in the table of measured figures, and at the top of the scripts."""
    yield from ((command.page, command.words) for command in called("python"))
    table = REPOSITORY / "benchmarks" / "results" / "bars.csv"
    with table.open(encoding="utf-8") as source:
        yield from ((table.name, tuple(shlex.split(row["command"]))) for row in csv.DictReader(source))
    for script in (*REPOSITORY.glob("benchmarks/*.py"), *REPOSITORY.glob("examples/*.py")):
        text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
        for line in re.findall(r"^ *(python .*)$", text.replace("\\\n", " "), re.MULTILINE):
            shown, *_ = re.split(r"  +(?=[A-Z(#])", line)  # what the command does stands behind it
            yield script.name, tuple(shlex.split(re.sub(r"[][]", "", shown)))  # in brackets: may be left out


def test_scripts() -> None:
    def with_dots_as_values(words: Sequence[str]) -> list[str]:
        """`...` behind an option is a value; elsewhere it stands for words that are not shown."""
        return [word for before, word in zip(("", *words), words, strict=False) if word != "..." or before[:2] == "--"]

    shown = [(where, with_dots_as_values(words[1:])) for where, words in script_commands() if "/" in words[1]]
    assert len(shown) > 100
    told = subprocess.run(
        [sys.executable, "tests/parse_scripts.py"],
        input=json.dumps([words for _, words in shown]),
        cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=True,
    ).stdout  # fmt: skip
    refusals = json.loads(told)
    assert [(place, refusal) for place, refusal in zip(shown, refusals, strict=True) if refusal is not None] == []
    assert all((REPOSITORY / command.words[1]).is_file() for command in called("sh"))


def test_pip() -> None:
    from pip._internal.commands import create_command

    def refusal(command: Command) -> str | None:
        name, *rest = command.words[command.words.index("pip") + 1 :] if "pip" in command.words else command.words[1:]
        told = io.StringIO()
        try:
            with contextlib.redirect_stderr(told):
                create_command(name).parser.parse_args(rest)
        except SystemExit:
            return told.getvalue()
        return None

    shown = called("pip")
    assert len(shown) > 5
    assert refused(shown, refusal) == []


def test_extras() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shown = {
        extra
        for page in PAGES
        for found in re.findall(rf"(?:{project['name']}|\.whl)\[([\w,-]+)\]", page.read_text(encoding="utf-8"))
        for extra in found.split(",")
    }
    assert {"auth", "postgres"} < shown <= set(project["optional-dependencies"])


def test_hf() -> None:
    def refusal(command: Command) -> str | None:
        _, name, *rest = command.words
        done = subprocess.run(
            [Path(sys.executable).with_name("hf"), name, "--help"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        unknown = {word for word in rest if word.startswith("-")} - set(re.findall(r"--?[a-z-]+", done.stdout))
        return done.stderr if done.returncode else f"no {sorted(unknown)}" if unknown else None

    shown = called("hf")
    assert shown
    assert refused(shown, refusal) == []


@pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType:UserWarning")  # MLflow's own, on import
def test_mlflow() -> None:
    from mlflow.cli import cli

    shown = called("mlflow")
    assert shown
    assert refused(shown, lambda command: refusal_of_click(cli, command.words[1:])) == []


def test_prefect() -> None:
    from prefect.cli import _app as module

    def refusal(command: Command) -> str | None:
        try:
            module._app.parse_args(command.words[1:], exit_on_error=False, print_error=False)
        except Exception as error:
            return str(error)
        return None

    shown = called("prefect")
    assert len(shown) > 4
    assert refused(shown, refusal) == []


def test_variables_of_alto_are_settings() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|", settings.__doc__ or "", re.MULTILINE))
    shown = {name for command in WRITTEN for name, _ in command.variables if name.startswith("ALTO_")}
    assert {"ALTO_HOME", "ALTO_STORE_URL"} <= shown <= listed


def test_files_of_programs_that_are_not_here() -> None:
    (compose,) = [command for command in called("docker") if "-f" in command.words]
    assert (REPOSITORY / compose.words[compose.words.index("-f") + 1]).is_file()
