"""How the command line starts and how errors leave it, as real processes where that matters."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from alto_core.errors import (
    AltoError,
    DataError,
    EngineError,
    ModelError,
    OwnerError,
    StoreError,
    TaskFileError,
    TrackingError,
)
from flows.cli import validate as validate_module
from flows.cli.app import PANELS, app
from flows.cli.interruption import CANCELLED_EXIT_CODE

REPOSITORY = Path(__file__).resolve().parents[3]
HEAVY = ("torch", "mlflow", "prefect", "transformers", "pandas", "sqlmodel", "pydantic", "jinja2")


def _alto(*arguments: str, cwd: Path = REPOSITORY, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)} | ({"ALTO_HOME": str(home)} if home else {})
    code = "from flows.cli.app import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, time; started = time.process_time()\n"
        "from flows.cli.app import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], time.process_time() - started)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    commands = [command for panel in PANELS.values() for command in panel.commands.registered_commands]
    assert len(commands) > 20
    for command in commands:
        assert (command.name or getattr(command.callback, "__name__", "")) in done.stdout
    loaded, seconds = done.stdout.splitlines()[-1].rsplit("]", 1)
    assert loaded == "["
    assert float(seconds) < 1.0


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("alto ")


@pytest.mark.parametrize("arguments", [["no-such-command"], ["tune"], ["validate", "--no-such-option", "x"]])
def test_a_wrong_command_line_exits_with_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TaskFileError("budget", got="1", expected="2"), 2),
        (DataError("rows"), 3),
        (ModelError("no layer"), 4),
        (EngineError("memory"), 5),
        (TrackingError("away"), 6),
        (StoreError("unknown"), 7),
        (OwnerError("bob's"), 8),
        (AltoError("a port is taken"), 1),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_each_error_is_one_message_with_its_exit_code(
    error: Exception, code: int, as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Path, *, as_json: bool) -> None:
        raise error

    monkeypatch.setattr(validate_module, "run_validate", fail)
    result = CliRunner().invoke(app, ["validate", "x.yaml", *(["--json"] if as_json else [])])
    assert result.exit_code == code
    assert result.stderr == f"alto: {error}\n"
    if as_json:
        assert json.loads(result.stdout) == {
            "event": "error",
            "kind": type(error).__name__,
            "text": str(error),
            "exit_code": code,
        }
    else:
        assert result.stdout == ""


def test_the_exit_codes_are_the_documented_ones() -> None:
    section = (REPOSITORY / "docs" / "cli.md").read_text(encoding="utf-8").partition("## Exit codes")[2]
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    kinds = {AltoError, *AltoError.__subclasses__()}
    usage = 2  # of the command line, as of a task file
    assert documented == {0, usage, CANCELLED_EXIT_CODE} | {kind.exit_code for kind in kinds}


def test_a_bug_keeps_its_traceback_and_ctrl_c_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: Path, *, as_json: bool) -> None:
        raise ZeroDivisionError

    def interrupt(file: Path, *, as_json: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(validate_module, "run_validate", fail)
    assert isinstance(CliRunner().invoke(app, ["validate", "x"]).exception, ZeroDivisionError)
    monkeypatch.setattr(validate_module, "run_validate", interrupt)
    assert CliRunner().invoke(app, ["validate", "x"]).exit_code == 130


def test_a_missing_file_is_told_as_a_process_tells_it(tmp_path: Path) -> None:
    for command in ("tune", "validate"):
        done = _alto(command, "missing.yaml", home=tmp_path / "alto")
        assert done.returncode == 2
        assert done.stdout == ""
        assert "missing.yaml: file: got no such file" in done.stderr
        assert "Traceback" not in done.stderr
