"""Runs the blocks for a shell that pages show."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli.app import app
from tests.pages import Block, commands_of

UNTIL_CTRL_C = {"ui", "up"}


def run_shell(text: str, patch: pytest.MonkeyPatch | None = None) -> dict[str, str]:
    """Run a block's commands one after the other, each of which must succeed, and return what they write by command.

    Those that run until Ctrl-C are left out, and `alto status --follow`, which runs until its task ends.

    Args:
        text: the block. It may call `alto`, which runs in this process, and `python`.
        patch: sets what the block exports.
    """
    told: dict[str, str] = {}
    for command in commands_of(Block("", "sh", text)):
        program, *words = command.words
        shown = " ".join(command.words)
        if program == "export":
            assert patch
            for name, value in command.variables:
                patch.setenv(name, os.path.expandvars(value.replace("$PWD", str(Path.cwd()))))
        elif program == "python":
            told[shown] = subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True).stdout
        elif words[0] not in UNTIL_CTRL_C and "--follow" not in words:
            assert program == "alto"
            written = io.StringIO()
            with contextlib.redirect_stdout(written):  # stderr stays: Prefect's log keeps the one that it finds
                exit_code = app(words, standalone_mode=False)
            assert not exit_code, f"{shown}: {exit_code}"
            told[shown] = written.getvalue()
    return told
