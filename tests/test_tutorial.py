"""The tutorial does what it says: its blocks run, and its rows and its task file mean the numbers that it shows."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.app import app
from tests.shell import run_shell

TUTORIAL = (Path(__file__).resolve().parents[1] / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL)


def block(language: str, beginning: str = "") -> str:
    """The first block of a language that begins so."""
    return next(text for name, text in BLOCKS if name == language and text.startswith(beginning))


def plain(text: str) -> str:
    """With one space for any white space, the thin one between thousands among it."""
    return re.sub(r"\s+", " ", text).strip()


@pytest.mark.smollm2
def test_its_rows_and_its_task_file_are_what_it_shows(
    smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALTO_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ALTO_DEVICE", "cpu")
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "quickstart").symlink_to(smollm2_folder.parent)
    (tmp_path / "make_dates.py").write_text(block("python"))
    subprocess.run([sys.executable, "make_dates.py"], check=True, timeout=60)
    rows = (tmp_path / "dates.jsonl").read_text().splitlines()
    shown = re.search(r"The first row is `(\{.*\})`", TUTORIAL)
    assert shown and rows[0] == shown[1]

    (tmp_path / "dates.yaml").write_text(block("yaml"))
    told = CliRunner().invoke(app, ["validate", "dates.yaml"])
    assert told.exit_code == 0, told.output
    for line in block("", "dates.yaml: ready to tune").splitlines():
        assert plain(line) in plain(told.stdout)

    wrong = block("yaml").replace("[4, 16]", "[4, sixteen]")
    (tmp_path / "dates.yaml").write_text(wrong)
    refused = CliRunner().invoke(app, ["validate", "dates.yaml"])
    assert refused.exit_code == 2
    assert "search_space.lora_rank[1]: got 'sixteen', expected a valid integer" in refused.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_all_its_blocks_run_one_after_the_other(
    tiny_model: Path,
    empty_database: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ALTO_HOME", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALTO_DEVICE", "cpu")
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart" / "model").symlink_to(tiny_model)
    (tmp_path / ".alto").mkdir()
    shutil.copy(empty_database, tmp_path / ".alto" / "mlflow.db")
    (tmp_path / "make_dates.py").write_text(block("python"))
    (tmp_path / "dates.yaml").write_text(block("yaml"))
    told: dict[str, str] = {}
    for language, text in BLOCKS:
        if language == "sh":
            told |= run_shell(text, monkeypatch)
    assert len(told) == 9
    outcome = told["alto tune dates.yaml"]
    for line in block("", "winner").splitlines():
        assert f"\n{line[:21]}" in outcome, "the lines that it shows have these names"
    assert told["alto explain dates-1 lr0.02-r4"].startswith("lr0.02-r4-b4-")
    assert (tmp_path / "dates.html").is_file()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(block("python", "from peft"), {})
    assert printed.getvalue().strip()
